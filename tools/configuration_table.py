"""Print docs/configuration.md: every setting of `stateferry.config.Config` with its bounds and meaning.

A unit test compares the page with what this prints.
"""

import ast
import enum
import inspect
import itertools
import typing
from pathlib import Path

import msgspec

from stateferry import config
from stateferry.pause import CPU_PAUSE_US, MOST_US, PAUSE_US

HEAD = """# Settings

Set in `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, or with `stateferry serve --set
key=value`. An unknown key or a value out of bounds ends the start with a message that names it. Made by
`python tools/configuration_table.py > docs/configuration.md`.

| key | default | allowed | meaning |
| --- | --- | --- | --- |
"""

TAIL = f"""
## Environment

`{PAUSE_US}`: microseconds, up to {MOST_US}, that vLLM's engine core and workers sleep between looks for
each other's messages; as shipped they look without a pause, for a second after each message. It is for
every process of an engine from its start, and acts on engines without this connector as well, so it is no
key of the table. Unset or 0: vLLM is left as it is. `stateferry serve` sets it to {CPU_PAUSE_US} for a
vLLM that is built for CPUs, unless it is set ([decision 7](decisions/0007-vllms-waits.md)).
"""


def meanings() -> dict[str, str]:
    """The texts under the fields of Config, by field."""
    tree = ast.parse(Path(inspect.getfile(config)).read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config").body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            assert isinstance(text.value, ast.Constant)
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def allowed(hint: object) -> str:
    """Type and bounds, for people."""
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ", ".join(f"`{member.value}`" for member in hint)
    bounds = [m for m in getattr(hint, "__metadata__", ()) if isinstance(m, msgspec.Meta)]
    origin = typing.get_args(hint)[0] if bounds else hint
    names = {float: "number", int: "whole number", str: "text", bool: "`true`, `false`"}
    table = typing.get_origin(origin) is dict
    name = "table" if table else names.get(origin, "list of text")
    limits = [
        f"{sign} {value:g}"
        for meta in bounds
        for sign, value in ((">", meta.gt), ("≥", meta.ge), ("≤", meta.le))
        if value is not None
    ]
    return ", ".join([name, *limits])


def shown(field: msgspec.structs.FieldInfo) -> str:
    """A default as one writes it in JSON."""
    made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return msgspec.json.encode(made).decode()


def page() -> str:
    """The whole page."""
    hints = typing.get_type_hints(config.Config, include_extras=True)
    texts = meanings()
    rows = [
        f"| `{f.name}` | `{shown(f)}` | {allowed(hints[f.name])} | {texts[f.name]} |\n"
        for f in msgspec.structs.fields(config.Config)
    ]
    return HEAD + "".join(rows) + TAIL


if __name__ == "__main__":
    print(page(), end="")
