"""Public tools for testing: in-process peers, the transport conformance suite, damage on purpose.

Nothing here is loaded in production, except what `testing: true` asks for.
"""
