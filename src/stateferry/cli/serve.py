"""`stateferry serve`: vLLM's OpenAI server with our connector configured."""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import typer

from stateferry.cli.examples import examples
from stateferry.cli.offline import need_vllm
from stateferry.cli.passed_on import option_name, refuse_misspelt
from stateferry.cli.preflight import check_model, check_ports, http_port
from stateferry.cli.serve_settings import OPTION_OF, read_options
from stateferry.cli.transport_names import TRANSPORT_NAMES
from stateferry.cli.vllm_server import MODULE, SERVER
from stateferry.config import Config
from stateferry.errors import ConfigError
from stateferry.pause import PAUSE_US, pause_us
from stateferry.stack import STATEFERRY, STATEFERRY_MODULE, Role
from stateferry.stack.host import engine_pause_us
from stateferry.vllm.versions import is_for_cpu, vllm_version

CACHE_GIB = "VLLM_CPU_KVCACHE_SPACE"
"""vLLM's size of the KV cache on CPU, in GiB."""

serve_app = typer.Typer(
    help="""Start one engine: vLLM's OpenAI server with StateFerry as its KV connector.

    MODEL comes first; every option that is not listed here goes to vLLM unchanged. Put a router that
    speaks vLLM's `kv_transfer_params` protocol in front (vllm-router, llm-d, Dynamo).""",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=examples(
        "stateferry serve prefill ./model --port 8100",
        "stateferry serve decode ./model --port 8200",
    ),
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
    typer.Option("--transport", help=f"What moves the bytes: {TRANSPORT_NAMES}.", show_default=False),
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
BootstrapPort = Annotated[
    str | None,
    typer.Option(
        "--bootstrap-port",
        help="Answer routers that send both legs at once here (GET /query); needs --kv-port.",
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


@serve_app.command(
    "prefill",
    short_help="Start the engine that reads prompts.",
    context_settings=PASS_ON,
    epilog=examples(
        "stateferry serve prefill ./model --port 8100 --max-model-len 8192",
        "stateferry serve prefill ./model --kv-host 10.0.0.1 --auth-key-file control.key",
    ),
)
def prefill(
    context: typer.Context,
    model: Model,
    transport: Transport = None,
    kv_host: KvHost = None,
    kv_port: KvPort = None,
    bootstrap_port: BootstrapPort = None,
    auth_key_file: AuthKeyFile = None,
    lease_s: LeaseS = None,
    load_mode: LoadModeOption = None,
    verify: Verify = None,
    setting: Set = None,
    dry_run: DryRun = False,
) -> None:
    """Start the engine that reads prompts."""
    _refuse(model, context)
    settings = read_options(
        transport,
        kv_host,
        kv_port,
        bootstrap_port,
        auth_key_file,
        lease_s,
        load_mode,
        verify,
        setting or [],
    )
    _serve(Role.PREFILL, model, *settings, context.args, dry_run)


@serve_app.command(
    "decode",
    short_help="Start the engine that writes answers.",
    context_settings=PASS_ON,
    epilog=examples(
        "stateferry serve decode ./model --port 8200 --max-model-len 8192 --verify state",
        "stateferry serve decode ./model --port 8200 --set transfer_timeout_s=30 --dry-run",
    ),
)
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
    """Start the engine that writes answers."""
    _refuse(model, context)
    settings = read_options(
        transport, kv_host, kv_port, None, auth_key_file, lease_s, load_mode, verify, setting or []
    )
    option = OPTION_OF["bootstrap_port"]
    if settings[1].bootstrap_port or any(option_name(argument) == option for argument in context.args):
        raise ConfigError(f"{option} is for `stateferry serve prefill`: routers ask prefill engines only")
    _serve(Role.DECODE, model, *settings, context.args, dry_run)


def transfer_config(role: Role, extra: Mapping[str, Any]) -> str:
    """The value of vLLM's `--kv-transfer-config`."""
    return json.dumps(
        {
            "kv_connector": STATEFERRY,
            "kv_connector_module_path": STATEFERRY_MODULE,  # also where VLLM_PLUGINS leaves us out
            "kv_role": role.value,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": extra,
        }
    )


def _refuse(model: str, context: typer.Context) -> None:
    """Raise ConfigError for what is surely meant otherwise among the arguments that vLLM would get."""
    if model.startswith("-"):
        raise ConfigError(f"MODEL comes before vLLM's own options, found {model!r} in its place")
    if any(option_name(argument) == "--kv-transfer-config" for argument in context.args):
        raise ConfigError(
            "--kv-transfer-config is what this command builds; use --set key=value for settings, or start "
            "vLLM yourself to write all of it"
        )
    ours = [name for parameter in context.command.params for name in parameter.opts if name[:2] == "--"]
    keys = (field.name for field in msgspec.structs.fields(Config))
    others = {f"--{key.replace('_', '-')}": key for key in keys if key not in OPTION_OF}
    refuse_misspelt(context.args, ours, others)


def _serve(
    role: Role,
    model: str,
    extra: Mapping[str, Any],
    config: Config,
    arguments: Sequence[str],
    dry_run: bool,
) -> None:
    transfer = transfer_config(role, extra)
    passed = ["--model", model, "--kv-transfer-config", transfer, *arguments]
    pause_us(os.environ)
    if dry_run:
        print(shlex.join([sys.executable, "-m", SERVER, *passed]))
        return
    need_vllm()
    check_model(model, arguments)
    check_ports(arguments, config)
    port = http_port(arguments)
    _say(
        f"starting a {role.name.lower()} engine with {model}"
        + (f", HTTP on port {port}" if port is not None else "")
        + f"; vLLM {vllm_version()} is imported first, which takes seconds without a word"
    )
    _say(f"it gets --kv-transfer-config '{transfer}'")
    if role is Role.DECODE:
        _say("what fails to arrive is computed here (kv_load_failure_policy recompute)")
    if PAUSE_US not in os.environ and (sleep_us := engine_pause_us()):
        os.environ[PAUSE_US] = str(sleep_us)
        _say(f"vLLM's processes sleep {sleep_us} us between looks for messages; {PAUSE_US}=0 leaves them")
    if is_for_cpu() and CACHE_GIB not in os.environ:
        # vLLM would take nearly all of the machine's memory, which leaves none for the other engine.
        os.environ[CACHE_GIB] = "4"
        _say(f"4 GiB for the KV cache; set {CACHE_GIB} for another size")
    os.execv(sys.executable, [sys.executable, "-m", MODULE, *passed])


def _say(text: str) -> None:
    print(f"stateferry: {text}", file=sys.stderr, flush=True)
