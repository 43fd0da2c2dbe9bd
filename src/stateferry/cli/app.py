"""All commands of `stateferry`. One line below adds one; each lives in a file beside this one."""

import typer

from stateferry.cli.bench import bench_app
from stateferry.cli.demo import demo
from stateferry.cli.doctor import doctor
from stateferry.cli.examples import examples
from stateferry.cli.gate import gate
from stateferry.cli.inspect import inspect
from stateferry.cli.key import key
from stateferry.cli.serve import PASS_ON, serve_app
from stateferry.cli.soak import soak
from stateferry.cli.top import top
from stateferry.cli.version import version

HELP = """Serve hybrid models over a prefill and a decode engine.

StateFerry moves attention KV and recurrent state (Mamba, GDN, short convolution …) from the engine
that reads the prompt to the engine that writes the answer.

Exit codes: 0 all right · 1 a verdict failed · 2 bad arguments or settings · 3 an engine did not
start, died or did not answer · 130 Ctrl-C."""

app = typer.Typer(
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "stateferry demo                              # see it work, with a bundled model",
        "stateferry gate                              # prove that it is exact",
        "stateferry serve prefill MODEL --port 8100   # an engine that reads prompts",
        "stateferry serve decode MODEL --port 8200    # an engine that writes answers",
        "stateferry doctor                            # what may keep engines from handing off here",
        "stateferry inspect MODEL --tp 1 --tp 2       # what a hand-off moves; starts nothing",
        "stateferry top --router http://HOST:8000     # engines, hand-offs a second, what failed and why",
        "stateferry key control.key                   # a secret for engines on several machines",
    ),
)
app.add_typer(serve_app, name="serve", short_help="Start one engine: vLLM's server with our connector.")
app.command(
    "demo",
    short_help="Show a hand-off on this machine, with a bundled model.",
    epilog=examples("stateferry demo", "stateferry demo --transport nixl --json"),
)(demo)
app.command(
    "gate",
    short_help="Prove that two engines answer exactly as one does.",
    epilog=examples(
        "stateferry gate --json",
        "stateferry gate --prefill-url http://p:8100 --decode-url http://d:8200 --model ./model",
    ),
)(gate)
app.command(
    "inspect",
    short_help="Show what a model keeps and a hand-off moves, without an engine.",
    context_settings=PASS_ON,
    epilog=examples("stateferry inspect ./model --tp 1 --tp 2 --tokens 4096 --max-model-len 8192"),
)(inspect)
app.command(
    "doctor",
    short_help="Find what keeps engines from handing off, and what to do.",
    epilog=examples(
        "stateferry doctor --prefill-url http://p:8100 --decode-url http://d:8200",
        "stateferry doctor --prefill-config prefill.yaml --decode-config decode.yaml",
    ),
)(doctor)
app.command(
    "soak",
    short_help="Hand off for a long time, with faults and clients that leave.",
    epilog=examples("stateferry soak --minutes 3", "stateferry soak --transport nixl --json"),
)(soak)
app.command(
    "top",
    short_help="Watch engines and their hand-offs.",
    epilog=examples(
        "stateferry top http://127.0.0.1:8100 http://127.0.0.1:8200",
        "stateferry top --router http://127.0.0.1:8000 --once   # plain tables, for a log or a ticket",
    ),
)(top)
app.add_typer(bench_app, name="bench", short_help="Measure, with every arm in the same run.")
app.command(
    "key",
    short_help="Make the secret that engines know each other by.",
    epilog=examples("stateferry key control.key"),
)(key)
app.command(
    "version",
    short_help="Print what is installed.",
    epilog=examples("stateferry version --json"),
)(version)
