"""The command line as a person meets it: help, exit codes, and what `serve` builds."""

import json
import shlex
import subprocess
import sys

import pytest
from tests.command import run


def run_apart(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a separate process, as a shell would: what `run` stands for."""
    code = "from stateferry.cli.main import main; main()"
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


@pytest.mark.parametrize("arguments", [("serve", "prefill", "m", "--dry-run"), ("nonsense",)])
def test_the_command_does_in_this_process_what_it_does_in_its_own(arguments: tuple[str, ...]) -> None:
    here, apart = run(*arguments), run_apart(*arguments)
    assert (here.returncode, here.stdout) == (apart.returncode, apart.stdout)
    assert here.stderr.splitlines()[-1:] == apart.stderr.splitlines()[-1:]


def served(*arguments: str) -> tuple[list[str], dict[str, object]]:
    """The command that `serve … --dry-run` prints, and its connector configuration."""
    result = run("serve", *arguments, "--dry-run")
    assert result.returncode == 0, result.stderr
    command = shlex.split(result.stdout)
    return command, json.loads(command[command.index("--kv-transfer-config") + 1])


@pytest.mark.parametrize("command", [(), ("serve", "decode"), ("bench", "handoff")])
def test_help_teaches_by_example(command: tuple[str, ...]) -> None:
    """`test_help.py` looks at every command's examples."""
    result = run(*command, "--help")
    assert result.returncode == 0
    assert "Example" in result.stdout
    assert result.stderr == ""


def test_exit_codes_are_documented() -> None:
    text = " ".join(run("--help").stdout.split())
    for words in (
        "0 all right",
        "1 a verdict failed",
        "2 bad arguments",
        "3 an engine did not",
        "130 Ctrl-C",
    ):
        assert words in text


def test_serve_builds_the_connector_configuration() -> None:
    command, config = served("prefill", "some/model", "--transport", "nixl", "--kv-host", "127.0.0.2")
    assert command[:5] == [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "some/model",
    ]
    assert config == {
        "kv_connector": "StateFerryConnector",
        "kv_connector_module_path": "stateferry.vllm.connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"transport": "nixl", "host": "127.0.0.2"},
    }


def test_serve_decode_is_a_consumer_and_takes_every_setting() -> None:
    _, config = served(
        "decode",
        "m",
        "--kv-port",
        "7000",
        "--lease-s",
        "2.5",
        "--load-mode",
        "sync",
        "--verify",
        "state",
        "--set",
        "retry_interval_s=3",
    )
    assert config["kv_role"] == "kv_consumer"
    extra = {"port": 7000, "lease_s": 2.5, "load_mode": "sync", "verify": "state", "retry_interval_s": 3}
    assert config["kv_connector_extra_config"] == extra


def test_serve_prefill_tells_routers_where_they_may_ask() -> None:
    _, config = served("prefill", "m", "--kv-port", "5600", "--bootstrap-port", "8998")
    assert config["kv_connector_extra_config"] == {"port": 5600, "bootstrap_port": 8998}
    refused = run("serve", "prefill", "m", "--bootstrap-port", "8998", "--dry-run")
    assert refused.returncode == 2
    assert "Set 'port', too" in refused.stderr


def test_serve_takes_moriios_settings_and_refuses_what_they_cannot_be() -> None:
    settings = ("--set", "read_mode=true", "--set", "http_port=8100", "--set", "handshake_port=6301")
    _, config = served("prefill", "m", *settings)
    extra = {"read_mode": True, "http_port": 8100, "handshake_port": 6301}
    assert config["kv_connector_extra_config"] == extra
    refused = run("serve", "prefill", "m", *settings[2:], "--dry-run")
    assert refused.returncode == 2
    assert "'read_mode'" in refused.stderr


def test_other_arguments_go_to_vllm_unchanged() -> None:
    others = ["--port", "8100", "--max-model-len=512", "-tp", "2", "--hf-overrides", '{"a": [1]}']
    command, _ = served("prefill", "m", *others)
    assert command[-len(others) :] == others


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--transport", "carrier-pigeon"], "transport"),
        (["--lease-s", "soon"], "--lease-s"),
        (["--lease-s", "-1"], "--lease-s"),
        (["--kv-port", "70000"], "port"),
        (["--verify", "perhaps"], "verify"),
        (["--load-mode", "later"], "--load-mode"),
        (["--set", "colour=red"], "colour"),
        (["--set", "colour"], "key=value"),
        (["--lease-s", "1", "--set", "lease_s=2"], "twice"),
        (["--kv-transfer-config", "{}"], "--kv-transfer-config"),
        (["--kv-transfer-config={}"], "--kv-transfer-config"),
        (["--transport", "foo"], "--transport 'foo': expected one of auto, cma"),
        (["--kv-port", "99999"], "--kv-port 99999: Expected `int` <= 65535"),
    ],
)
def test_a_bad_setting_is_refused_with_its_name(arguments: list[str], words: str) -> None:
    result = run("serve", "prefill", "m", *arguments, "--dry-run")
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve", "prefill"],
        ["serve", "prefill", "--port", "8100", "m"],
        ["demo", "--transport", "carrier-pigeon"],
        ["demo", "--load-mode", "later"],
        ["gate", "--load-mode", "later"],
        ["gate", "--load-mode", "sync", "--prefill-url", "http://p", "--decode-url", "http://d"],
        ["demo", "--unknown"],
        ["inspect"],
        ["doctor", "--prefill-url", "http://p"],
        ["inspect", "no/such/folder"],
        ["inspect", "m", "--tp", "0"],
        ["bench", "handoff", "--model", "no/such/folder"],
        ["gate", "--timeout-s", "0"],
        ["nonsense"],
    ],
)
def test_bad_usage_has_exit_code_2(arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert result.stderr
    assert "Traceback" not in result.stderr


def test_version_names_what_is_installed() -> None:
    versions = json.loads(run("version", "--json").stdout)
    assert versions["stateferry"]
    assert "torch" in versions
    assert f"stateferry {versions['stateferry']}" in run("version").stdout


def test_footprint_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stateferry.cli.offline.importlib.util.find_spec", lambda name: None)
    result = run("bench", "footprint")
    assert result.returncode == 3
    assert "vLLM is not installed" in result.stderr
