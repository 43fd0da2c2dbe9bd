"""`stateferry serve`'s own options as the settings of an engine."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stateferry.config import Config, parse_config
from stateferry.errors import ConfigError
from stateferry.ferry.keys import control_key
from stateferry.moriio import read_settings, speaks_moriio

OPTION_OF = {
    "transport": "--transport",
    "host": "--kv-host",
    "port": "--kv-port",
    "bootstrap_port": "--bootstrap-port",
    "auth_key_file": "--auth-key-file",
    "lease_s": "--lease-s",
    "load_mode": "--load-mode",
    "verify": "--verify",
}
"""Settings that have an option of their own; `--host` and `--port` are vLLM's."""


def read_options(
    transport: str | None,
    kv_host: str | None,
    kv_port: str | None,
    bootstrap_port: str | None,
    auth_key_file: str | None,
    lease_s: str | None,
    load_mode: str | None,
    verify: str | None,
    others: Sequence[str],
) -> tuple[dict[str, Any], Config]:
    """Our options as `kv_connector_extra_config`, and what that comes to. Raises ConfigError."""
    named = {
        "transport": transport,
        "host": kv_host,
        "port": kv_port,
        "bootstrap_port": bootstrap_port,
        "lease_s": lease_s,
        "load_mode": load_mode,
        "verify": verify,
    }
    extra: dict[str, Any] = {key: _value(text) for key, text in named.items() if text is not None}
    if auth_key_file is not None:
        extra["auth_key_file"] = str(Path(auth_key_file).absolute())
    for text in others:
        key, separator, value = text.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set {text!r}: expected key=value, such as --set transfer_timeout_s=30")
        if key in extra:
            raise ConfigError(f"--set {text!r}: {key!r} is given twice")
        extra[key] = _value(value)
    try:
        config = (
            read_settings(extra, default_host="127.0.0.1", environ=os.environ)[0]
            if speaks_moriio(extra)
            else parse_config(extra)
        )
    except ConfigError as e:
        raise ConfigError(_with_options(str(e), named)) from e
    control_key(config, config.bind_host or config.host)
    return extra, config


def _with_options(text: str, named: Mapping[str, str | None]) -> str:
    """Call a setting by the option that it was given with."""
    for key in (key for key, value in named.items() if value is not None):
        text = text.replace(f"kv_connector_extra_config: key {key!r} = ", f"{OPTION_OF[key]} ")
    return text


def _value(text: str) -> Any:
    """Numbers, true, false and lists are read as JSON; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text
