"""StateFerry moves attention KV and recurrent state from a prefill to a decode vLLM engine.

Importing this package loads neither torch nor vllm.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
