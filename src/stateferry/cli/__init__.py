"""The `stateferry` command: arguments and printing only."""

__all__: list[str] = []
