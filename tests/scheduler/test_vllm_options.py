"""`serve` passes options on that it does not know: none of vLLM's may be taken for a misspelt one of ours."""

import shlex
import warnings

import msgspec
import pytest
import typer
from tests.unit.test_help import COMMANDS, help_text, shown

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing vLLM warns about its own dependencies
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from stateferry.vllm.compat import server_arguments

from tests.documented import vllm_options

from stateferry.cli import passed_on, serve
from stateferry.cli.serve_settings import OPTION_OF
from stateferry.config import Config
from stateferry.errors import ConfigError

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def parser() -> FlexibleArgumentParser:
    return server_arguments(FlexibleArgumentParser())


def accused(parser: FlexibleArgumentParser) -> list[str]:
    """Options of vLLM's server that `serve decode` refuses."""
    context = typer.Context(COMMANDS["serve decode"])
    found = []
    for option in parser._option_string_actions:
        context.args = [option, "1"]
        try:
            serve._refuse("m", context)
        except ConfigError as e:
            found.append(f"{option}: {e}")
    return [text for text in found if not text.startswith("--kv-transfer-config:")]


def test_no_option_of_vllm_is_refused(parser: FlexibleArgumentParser) -> None:
    assert len(parser._option_string_actions) > 200
    assert accused(parser) == []


def test_a_rule_that_is_too_wide_is_noticed(
    parser: FlexibleArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(passed_on, "LIKENESS", 0.8)
    assert any(text.startswith("--port:") for text in accused(parser))


def test_every_setting_with_an_option_is_a_setting() -> None:
    assert set(OPTION_OF) <= {field.name for field in msgspec.structs.fields(Config)}


@pytest.mark.parametrize("name", ["serve", "serve prefill", "serve decode"])
def test_vllms_own_parser_takes_the_examples_of_serve(parser: FlexibleArgumentParser, name: str) -> None:
    for words in shown(help_text(name)):
        if "--auth-key-file" not in words:  # it would have to exist
            assert parser.parse_args(vllm_options([w for w in words if w != "--dry-run"])).port, shlex.join(
                words
            )
