"""The `stateferry` command: arguments and printing only."""
