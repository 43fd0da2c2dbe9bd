"""Where a command is to write, looked at before it begins: an hour's result is not lost to a misspelt folder.

Callbacks of options; each raises ConfigError that names its option.
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from stateferry.errors import ConfigError


def writable_file(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """A file that can be written, or written anew."""
    if path is None:
        return None
    folder = path.absolute().parent
    if path.is_dir():
        why = "is a folder"
    elif not folder.is_dir():
        why = f"cannot be written: there is no folder {str(folder)!r}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        why = "cannot be written by this user"
    else:
        return path
    raise ConfigError(f"{option.opts[0]} {str(path)!r} {why}; name a file in a folder that is there")


def made_folder(option: typer.CallbackParam, path: Path | None) -> Path | None:
    """A folder that can be written into; made if missing."""
    if path is not None:
        make_folder(path, option.opts[0])
    return path


def make_folder(path: Path, option: str) -> None:
    """The same for a folder that `option` would name. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        why = e.strerror or type(e).__name__
    else:
        if os.access(path, os.W_OK):
            return
        why = "not writable by this user"
    raise ConfigError(f"{option} {str(path)!r} cannot be used ({why}): name a folder to write into")


LogFolderOption = Annotated[
    Path | None,
    typer.Option(
        "--log-folder", callback=made_folder, help="Keep the servers' logs here.", show_default=False
    ),
]
"""For every command that starts servers."""
