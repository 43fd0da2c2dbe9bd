"""The command line as its users run it, in this interpreter."""

import sys

STATEFERRY = (sys.executable, "-c", "from stateferry.cli.main import main; main()")
