"""The only room that imports vLLM. See docs/design.md: rooms. Importing this package loads nothing."""
