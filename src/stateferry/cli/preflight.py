"""What would end an engine half a minute after its start, looked at before: its ports and its model."""

import errno
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from stateferry.cli.passed_on import last_value
from stateferry.config import Config, control_port
from stateferry.errors import ConfigError

HTTP_PORT = 8000
"""vLLM's own default."""
REACH_S = 5.0
MODEL_CONFIGS = ("config.json", "params.json")
"""One of them makes a folder a model: Hugging Face's, or Mistral's."""
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
PROXIES = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY")
TRUE = ("1", "on", "yes", "true")
HUB = "https://huggingface.co"
CURES = {
    errno.EADDRINUSE: "something listens there already: stop it (`ss -ltnp` names it), or take another port",
    errno.EADDRNOTAVAIL: "this machine has no such address (`ip address` lists those that it has)",
    errno.EACCES: "this user may not listen there: take a port above 1023",
}


def check_ports(arguments: Sequence[str], config: Config) -> None:
    """Raise ConfigError where a port of an engine like this cannot be bound: vLLM's HTTP, control, bootstrap.

    `arguments` are vLLM's. What only vLLM can say (a port in its config file, ranks of a data-parallel
    engine) is left to it. Binds each port for a moment.
    """
    host, port = last_value(arguments, "--host") or "", http_port(arguments)
    if port is not None:
        _try_to_bind(host, port, "--port")
    if not config.port or any(argument.startswith(("--data-parallel", "-dp")) for argument in arguments):
        return
    ranks = _number(last_value(arguments, "--tensor-parallel-size", "-tp")) or 1
    ours, bind_host = config.bootstrap_port, config.bind_host or config.host
    for rank in range(ranks):
        control = control_port(config.port, 0, ranks, rank)
        if control in (port, ours):
            other = "the HTTP --port" if control == port else "the --bootstrap-port"
            raise ConfigError(
                f"--kv-port {config.port}: rank {rank} would listen on {control}, which is {other}"
            )
        _try_to_bind(bind_host, control, "--kv-port")
    if ours and ours == port:
        raise ConfigError(f"--bootstrap-port {ours} is the HTTP --port, too: give each a port of its own")
    if ours:
        _try_to_bind(bind_host, ours, "--bootstrap-port")


def http_port(arguments: Sequence[str]) -> int | None:
    """Where vLLM will serve; None where it is not a TCP port, or its own parser is to say what is wrong."""
    if last_value(arguments, "--uds") is not None:
        return None
    text = last_value(arguments, "--port")
    if text is None:
        return None if last_value(arguments, "--config") is not None else HTTP_PORT
    return _number(text)


def check_model(model: str, arguments: Sequence[str]) -> None:
    """Raise ConfigError where vLLM would find no model by that name. May look up the hub's address, once."""
    path = Path(model)
    if "://" in model:
        return  # storage that vLLM knows how to read
    try:
        if path.is_dir():
            if last_value(arguments, "--hf-config-path") is None:
                _check_folder(path, model)
            return
        if path.is_file():
            if path.suffix != ".gguf":
                raise ConfigError(f"MODEL {model!r} is a file: name the folder with config.json and weights")
            return
    except OSError as e:
        raise ConfigError(f"MODEL {model!r} cannot be looked at: {e}") from e
    if model.startswith((".", "/", "~")) or model.endswith("/") or model.count("/") > 1:
        raise ConfigError(f"MODEL {model!r}: there is no such folder; name one with config.json and weights")
    _check_name(model, last_value(arguments, "--revision"))


def _check_folder(path: Path, model: str) -> None:
    if any((path / name).is_file() for name in MODEL_CONFIGS):
        return
    inside = sorted(entry.parent.name for entry in path.glob(f"*/{MODEL_CONFIGS[0]}"))
    hint = ""
    if len(inside) == 1:
        hint = f"; {inside[0]!r} in it is one"
    elif inside:
        hint = f"; {len(inside)} folders in it are"
    raise ConfigError(
        f"MODEL {model!r} is a folder without a config.json: name the folder that holds a model's "
        f"config.json and weights{hint}"
    )


def _check_name(model: str, revision: str | None) -> None:
    """A name on a hub: it must be here already, or the hub in reach."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in TRUE or _is_cached(model, revision):
        return
    variable = next((name for name in OFFLINE if os.environ.get(name, "").lower() in TRUE), None)
    if variable is not None:
        why = f"{variable}={os.environ[variable]} forbids to download it"
    else:
        hub = os.environ.get("HF_ENDPOINT", HUB)
        reason = _why_unreachable(hub)
        if not reason:
            return
        why = f"{hub} cannot be reached ({reason})"
    raise ConfigError(
        f"MODEL {model!r} is no folder here, was not downloaded before, and {why}: name a folder with a "
        "config.json and weights"
    )


def _is_cached(model: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache  # takes half a second; vLLM brings it

    try:
        found = [try_to_load_from_cache(model, name, revision=revision) for name in MODEL_CONFIGS]
        return any(isinstance(path, str) for path in found)
    except ValueError as e:
        raise ConfigError(f"MODEL {model!r} is neither a folder here nor a model's name: {e}") from e


def _why_unreachable(url: str) -> str:
    """Why no connection to that host can be made; empty where one can, or where a proxy makes it."""
    if any(os.environ.get(name) or os.environ.get(name.lower()) for name in PROXIES):
        return ""
    parts = urlsplit(url)
    try:
        port = parts.port or (80 if parts.scheme == "http" else 443)
        with socket.create_connection((parts.hostname or "", port), REACH_S):
            return ""
    except (OSError, ValueError) as e:
        return str(e)


def _try_to_bind(host: str, port: int, option: str) -> None:
    """As vLLM and its control sockets do: a port whose last connections linger may be taken again."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError, ValueError) as e:
        cure = CURES.get(e.errno or 0, str(e)) if isinstance(e, OSError) else str(e)
        where = f" on {host}" if host else ""
        raise ConfigError(f"{option}: cannot listen on port {port}{where}: {cure}") from e


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
