"""Options of vLLM that go through `serve` unread, and options of ours that are written wrongly."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stateferry.cli.app import app
from stateferry.cli.passed_on import last_value, option_name
from stateferry.errors import ConfigError


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("--port", "--port"),
        ("--max_model_len=8", "--max-model-len"),
        ("-tp", ""),
        ("--", ""),
        ("8100", ""),
        ("", ""),
    ],
)
def test_long_options_have_one_name(argument: str, name: str) -> None:
    assert option_name(argument) == name


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        ([], None),
        (["--port", "1"], "1"),
        (["--port=1"], "1"),
        (["--port", "1", "--x", "--port=2"], "2"),
        (["--port"], None),
        (["--report", "1"], None),
        (["-p", "3"], "3"),
    ],
)
def test_the_last_value_counts(arguments: list[str], value: str | None) -> None:
    assert last_value(arguments, "--port", "-p") == value


def refusal(*arguments: str) -> str:
    """What `serve` says of these options; empty if it takes them."""
    result = CliRunner().invoke(app, ["serve", "decode", "m", *arguments, "--dry-run"])
    if isinstance(result.exception, ConfigError):
        return str(result.exception)
    assert result.exit_code == 0, result.output
    return ""


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--trasport", "--transport"),
        ("--transprot=cma", "--transport"),
        ("--kvport", "--kv-port"),
        ("--kv_host", "--kv-host"),
        ("--lease", "--lease-s"),
        ("--lod-mode", "--load-mode"),
        ("--auth-keyfile", "--auth-key-file"),
        ("--dryrun", "--dry-run"),
        ("--verfy", "--verify"),
    ],
)
def test_a_misspelt_option_of_ours_is_told_what_was_meant(typed: str, meant: str) -> None:
    said = refusal(typed, "1")
    assert f"did you mean {meant}?" in said
    assert typed.partition("=")[0] in said


def test_a_setting_without_an_option_is_told_how_it_is_set() -> None:
    assert "--set transfer_timeout_s=VALUE" in refusal("--transfer-timeout-s", "3")
    assert "--set read_retries=VALUE" in refusal("--read_retries=1")
    assert refusal("--set", "read_retries=1") == ""


@pytest.mark.parametrize(
    "options",
    [["--bootstrap-port", "8998"], ["--kv-port", "5600", "--set", "bootstrap_port=8998"]],
)
def test_a_decode_engine_has_no_port_that_routers_ask(options: list[str]) -> None:
    assert "is for `stateferry serve prefill`" in refusal(*options)


@pytest.mark.parametrize(
    "options", [["--host", "h"], ["--port", "1"], ["--load-format", "auto"], ["--seed", "1"]]
)
def test_options_of_vllm_that_look_like_ours_are_left_alone(options: list[str]) -> None:
    """All of vLLM's are tried in tests/scheduler."""
    assert refusal(*options) == ""


def test_a_typo_ends_the_command_before_anything_starts() -> None:
    code = "from stateferry.cli.main import main; main()"
    command = [sys.executable, "-c", code, "serve", "prefill", "m", "--trasport", "cma"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "stateferry: there is no option --trasport; did you mean --transport?\n"
    assert result.stdout == ""
