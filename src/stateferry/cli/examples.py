"""What every command's help ends with: lines that somebody may type as they stand."""


def examples(*lines: str) -> str:
    """The end of a help text. What stands behind `  # ` in a line says what it is for."""
    title = "Example:" if len(lines) == 1 else "Examples:"
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
