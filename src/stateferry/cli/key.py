"""`stateferry key FILE`: make the secret that engines know each other by."""

from pathlib import Path
from typing import Annotated

import typer

from stateferry.ferry.keys import write_key


def key(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write it; must not exist yet.")],
) -> None:
    """Write a new key file, readable by its owner only.

    Every engine needs a copy of the same file: --auth-key-file FILE, or auth_key_file in
    kv_connector_extra_config. docs/security.md says what it protects and how to change it.
    """
    write_key(file)
    print(f"wrote {file}: copy it to every engine and set auth_key_file there")
