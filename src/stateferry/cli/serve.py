"""`stateferry serve`: vLLM's OpenAI server with our connector configured."""

import importlib.metadata
import importlib.util
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from stateferry.config import parse_config
from stateferry.errors import ConfigError, EngineError
from stateferry.ferry.keys import control_key
from stateferry.moriio import read_settings, speaks_moriio
from stateferry.stack import STATEFERRY, STATEFERRY_MODULE, Role

CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's size of the KV cache on CPU, in GiB."""

serve_app = typer.Typer(
    help="""Start one engine: vLLM's OpenAI server with StateFerry as its KV connector.

    MODEL comes first; every option that is not listed here goes to vLLM unchanged. Put a router that
    speaks vLLM's `kv_transfer_params` protocol in front (vllm-router, llm-d, Dynamo).""",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PASS_ON = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "allow_interspersed_args": True,
}

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Model folder or name, then any options of vLLM's server.",
        show_default=False,
    ),
]
Transport = Annotated[
    str | None,
    typer.Option(
        "--transport", help="What moves the bytes: auto, cma, cudaipc, nixl, mooncake.", show_default=False
    ),
]
KvHost = Annotated[
    str | None,
    typer.Option(
        "--kv-host", help="Address of this machine that the other engines dial.", show_default=False
    ),
]
KvPort = Annotated[
    str | None,
    typer.Option(
        "--kv-port",
        help="First control port; rank r listens on the r-th from here. 0: the system picks.",
        show_default=False,
    ),
]
AuthKeyFile = Annotated[
    str | None,
    typer.Option(
        "--auth-key-file",
        help="Secret that engines know each other by; needed off loopback (`stateferry key`).",
        show_default=False,
    ),
]
LeaseS = Annotated[
    str | None,
    typer.Option(
        "--lease-s",
        help="Seconds for which a finished prompt waits for its decode engine.",
        show_default=False,
    ),
]
LoadModeOption = Annotated[
    str | None,
    typer.Option(
        "--load-mode",
        help="When a decode engine reads: async (blocks first), or sync (ahead, into a waiting room).",
        show_default=False,
    ),
]
Verify = Annotated[
    str | None,
    typer.Option("--verify", help="Compare digests of what arrives: off, state, all.", show_default=False),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any other setting, as key=value; may be repeated.", show_default=False),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the command and stop.")]


@serve_app.command("prefill", short_help="Start the engine that reads prompts.", context_settings=PASS_ON)
def prefill(
    context: typer.Context,
    model: Model,
    transport: Transport = None,
    kv_host: KvHost = None,
    kv_port: KvPort = None,
    auth_key_file: AuthKeyFile = None,
    lease_s: LeaseS = None,
    load_mode: LoadModeOption = None,
    verify: Verify = None,
    setting: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Start the engine that reads prompts.

    Example: stateferry serve prefill ./model --port 8100 --max-model-len 8192
    """
    extra = _settings(transport, kv_host, kv_port, auth_key_file, lease_s, load_mode, verify, setting or [])
    _serve(Role.PREFILL, model, extra, context.args, dry_run)


@serve_app.command("decode", short_help="Start the engine that writes answers.", context_settings=PASS_ON)
def decode(
    context: typer.Context,
    model: Model,
    transport: Transport = None,
    kv_host: KvHost = None,
    kv_port: KvPort = None,
    auth_key_file: AuthKeyFile = None,
    lease_s: LeaseS = None,
    load_mode: LoadModeOption = None,
    verify: Verify = None,
    setting: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Start the engine that writes answers.

    Example: stateferry serve decode ./model --port 8200 --max-model-len 8192 --verify state
    """
    extra = _settings(transport, kv_host, kv_port, auth_key_file, lease_s, load_mode, verify, setting or [])
    _serve(Role.DECODE, model, extra, context.args, dry_run)


def serve_command(role: Role, model: str, extra: dict[str, Any], arguments: Sequence[str]) -> list[str]:
    """The command line of vLLM's server."""
    config = {
        "kv_connector": STATEFERRY,
        "kv_connector_module_path": STATEFERRY_MODULE,  # also where VLLM_PLUGINS leaves us out
        "kv_role": role.value,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return [*command, "--kv-transfer-config", json.dumps(config), *arguments]


def _settings(
    transport: str | None,
    kv_host: str | None,
    kv_port: str | None,
    auth_key_file: str | None,
    lease_s: str | None,
    load_mode: str | None,
    verify: str | None,
    others: Sequence[str],
) -> dict[str, Any]:
    """Our options as `kv_connector_extra_config`, checked. Raises ConfigError."""
    named = {
        "transport": transport,
        "host": kv_host,
        "port": kv_port,
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
    return extra


def _with_options(text: str, named: Mapping[str, str | None]) -> str:
    """Call a setting by the option that it was given with."""
    for key in (key for key, value in named.items() if value is not None):
        option = {"host": "--kv-host", "port": "--kv-port"}.get(key, f"--{key.replace('_', '-')}")
        text = text.replace(f"kv_connector_extra_config: key {key!r} = ", f"{option} ")
    return text


def _value(text: str) -> Any:
    """Numbers, true, false and lists are read as JSON; anything else is a string."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _serve(role: Role, model: str, extra: dict[str, Any], arguments: Sequence[str], dry_run: bool) -> None:
    if model.startswith("-"):
        raise ConfigError(f"MODEL comes before vLLM's own options, found {model!r} in its place")
    if any(argument.partition("=")[0] == "--kv-transfer-config" for argument in arguments):
        raise ConfigError(
            "--kv-transfer-config is what this command builds; use --set key=value for settings, or start "
            "vLLM yourself to write all of it"
        )
    command = serve_command(role, model, extra, arguments)
    if dry_run:
        print(shlex.join(command))
        return
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "vLLM is not installed in this Python environment. With StateFerry's source: `make setup`; "
            "otherwise pip install 'stateferry[cpu]' or 'stateferry[cuda]'."
        )
    print(
        f"stateferry: starting a {role.name.lower()} engine; what fails to arrive is recomputed "
        "(kv_load_failure_policy=recompute)",
        file=sys.stderr,
        flush=True,
    )
    if _for_cpu() and CACHE_GIB not in os.environ:
        # vLLM would take nearly all of the machine's memory, which leaves none for the other engine.
        os.environ[CACHE_GIB] = "4"
        print(
            f"stateferry: 4 GiB for the KV cache; set {CACHE_GIB} for another size",
            file=sys.stderr,
            flush=True,
        )
    os.execvp(command[0], command)


def _for_cpu() -> bool:
    """Whether the vLLM here is the build for CPUs."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
