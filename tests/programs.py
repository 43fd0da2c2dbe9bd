"""Programs that are no modules of a package (`tools/`, `examples/`), loaded by their path."""

import importlib.util
from pathlib import Path
from types import ModuleType


def loaded(path: Path) -> ModuleType:
    """The program as a module of its file's name; it runs up to, not including, its `main`."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
