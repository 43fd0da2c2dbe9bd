"""See docs/design.md: rooms."""
