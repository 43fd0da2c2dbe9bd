"""What `serve` finds wrong before vLLM is loaded: a port that is taken, a folder without a model."""

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stateferry.cli import preflight
from stateferry.cli.preflight import check_model, check_ports, http_port
from stateferry.config import Config
from stateferry.errors import ConfigError
from stateferry.models import RECALL_GDN


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens, and nobody on the one before it."""
    while True:
        # Below those that the system picks from: the one before must stay free.
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, socket.socket() as before, suppress(OSError):
            before.bind(("127.0.0.1", port - 1))
            before.close()
            listener.bind(("127.0.0.1", port))
            listener.listen()
            yield port
            return


@pytest.fixture
def free() -> int:
    """One on which nobody does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(
    "form", ["--port {}", "--port={}", "--host 127.0.0.1 --port {}", "--port 1 --port {}"]
)
def test_a_taken_http_port_is_named(taken: int, form: str) -> None:
    with pytest.raises(ConfigError, match=f"--port: cannot listen on port {taken}.*something listens there"):
        check_ports(form.format(taken).split(), Config())


def test_a_taken_control_port_is_named_for_every_rank(taken: int, free: int) -> None:
    http = ["--port", str(free)]
    with pytest.raises(ConfigError, match=f"--kv-port: cannot listen on port {taken}"):
        check_ports(http, Config(port=taken))
    two = [*http, "--tensor-parallel-size", "2"]
    with pytest.raises(ConfigError, match=f"--kv-port: cannot listen on port {taken}"):
        check_ports(two, Config(port=taken - 1))
    # Of several data-parallel engines only vLLM knows which ports they take.
    check_ports([*two, "--data-parallel-size", "2"], Config(port=taken - 1))


def test_one_port_for_both_is_noticed(free: int) -> None:
    with pytest.raises(ConfigError, match=f"rank 0 would listen on {free}, which is the HTTP --port"):
        check_ports(["--port", str(free)], Config(port=free))


def test_the_port_that_routers_ask_is_looked_at_too(taken: int, free: int) -> None:
    http, control = ["--port", str(free)], taken - 1
    with pytest.raises(ConfigError, match=f"--bootstrap-port: cannot listen on port {taken}"):
        check_ports(http, Config(port=control, bootstrap_port=taken))
    with pytest.raises(ConfigError, match=f"rank 0 would listen on {control}, which is the --bootstrap-port"):
        check_ports(http, Config(port=control, bootstrap_port=control))
    with pytest.raises(ConfigError, match=f"--bootstrap-port {free} is the HTTP --port, too"):
        check_ports(http, Config(port=control, bootstrap_port=free))


def test_free_ports_are_free_again_afterwards(free: int) -> None:
    for _ in range(2):
        check_ports(["--port", str(free), "--host", "127.0.0.1"], Config())
    with socket.socket() as server:
        server.bind(("127.0.0.1", free))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "203.0.113.7", "--port", "0"], "no such address"),
        (["--host", "a..b", "--port", "0"], "a..b"),
        (["--port", "99999"], "99999"),
    ],
)
def test_an_address_that_cannot_be_bound_is_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_ports(arguments, Config())


@pytest.mark.parametrize(
    ("arguments", "port"),
    [
        ([], 8000),
        (["--port", "81"], 81),
        (["--uds", "/tmp/x", "--port", "81"], None),
        (["--config", "engine.yaml"], None),
        (["--config", "engine.yaml", "--port", "81"], 81),
        (["--port", "eighty"], None),
    ],
)
def test_the_port_is_the_one_that_vllm_will_take(arguments: list[str], port: int | None) -> None:
    assert http_port(arguments) == port


# -- the model -------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache with nothing in it, and no proxy."""
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_USE_MODELSCOPE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name in preflight.PROXIES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setattr(preflight, "_is_cached", lambda model, revision: False)


def test_a_folder_with_a_model_is_taken() -> None:
    check_model(str(RECALL_GDN), [])


def test_a_folder_without_one_is_refused_and_one_in_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"without a config.json: name the folder .* and weights$"):
        check_model(str(tmp_path), [])
    for name, says in (("one", "; 'one' in it is one$"), ("two", "; 2 folders in it are$")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
        with pytest.raises(ConfigError, match=says):
            check_model(str(tmp_path), [])
    check_model(str(tmp_path), ["--hf-config-path", "elsewhere"])
    (tmp_path / "params.json").touch()
    check_model(str(tmp_path), [])


@pytest.mark.parametrize("name", ["/no/such/folder", "./model", "../model", "a/b/c", "model/", "~/model"])
def test_a_path_that_is_not_there_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        check_model(name, [])


def test_a_file_is_no_model_unless_vllm_reads_it(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="is a file"):
        check_model(str(tmp_path / "model.safetensors"), [])
    check_model(str(tmp_path / "model.gguf"), [])
    check_model("s3://bucket/model", [])


@pytest.mark.parametrize("variable", preflight.OFFLINE)
def test_a_name_offline_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=rf"'owner/name' is no folder here.*{variable}=1 forbids"):
        check_model("owner/name", [])
    monkeypatch.setattr(preflight, "_is_cached", lambda model, revision: revision == "main")
    check_model("owner/name", ["--revision", "main"])
    with pytest.raises(ConfigError):
        check_model("owner/name", ["--revision", "other"])


def test_a_name_is_refused_where_its_hub_cannot_be_reached(
    monkeypatch: pytest.MonkeyPatch, taken: int, free: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free}")
    with pytest.raises(ConfigError, match=f"http://127.0.0.1:{free} cannot be reached .*refused"):
        check_model("owner/name", [])
    with monkeypatch.context() as proxied:  # what a proxy reaches is not ours to judge
        proxied.setenv("https_proxy", "http://proxy:3128")
        check_model("owner/name", [])
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken}")
    check_model("owner/name", [])


def test_what_was_downloaded_is_found_where_the_hubs_library_keeps_it(tmp_path: Path) -> None:
    """In a process of its own: the library reads where its cache is when it is imported."""
    commit = "0" * 40
    folder = tmp_path / "hub" / "models--owner--name"
    for name, text in (("refs/main", commit), (f"snapshots/{commit}/config.json", "{}")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    code = (
        "import json; from stateferry.cli.preflight import _is_cached as found; "
        "asked = (('owner/name', None), ('owner/name', 'v2'), ('a/b', None)); "
        "print(json.dumps([found(*ask) for ask in asked]))"
    )
    env = {"HF_HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [True, False, False]


# -- the command -----------------------------------------------------------------------------------


FAKE_SERVER = """
import json, sys
if __name__ == "__main__":
    print(json.dumps(sys.argv[1:]))
"""


def serve(*arguments: str, vllm: Path) -> subprocess.CompletedProcess[str]:
    """`stateferry serve` in a process whose vLLM only says that it was started, and with what."""
    package = vllm / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").write_text("")
    (package / "api_server.py").write_text(FAKE_SERVER)
    code = "from stateferry.cli.main import main; main()"
    env = {"PYTHONPATH": ":".join([str(vllm), *sys.path]), "HF_HUB_OFFLINE": "1", "HF_HOME": str(vllm)}
    command = [sys.executable, "-c", code, "serve", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True)


def test_serve_says_what_it_starts_and_which_configuration_it_passes(free: int, tmp_path: Path) -> None:
    model, port = str(RECALL_GDN), str(free)
    result = serve("decode", model, "--port", port, "--lease-s", "7", vllm=tmp_path)
    assert result.returncode == 0, result.stderr
    passed = json.loads(result.stdout)
    assert passed[:2] == ["--model", model]
    assert passed[-2:] == ["--port", port]
    transfer = passed[passed.index("--kv-transfer-config") + 1]
    assert json.loads(transfer)["kv_connector_extra_config"] == {"lease_s": 7}
    first, second, *_ = result.stderr.splitlines()
    assert first.startswith(f"stateferry: starting a decode engine with {model}, HTTP on port {port};")
    assert second == f"stateferry: it gets --kv-transfer-config '{transfer}'"


def test_a_model_that_is_not_there_ends_serve_in_one_line(tmp_path: Path) -> None:
    result = serve("prefill", "owner/name", vllm=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("stateferry: MODEL 'owner/name' is no folder here")
    assert "HF_HUB_OFFLINE=1 forbids" in line


def test_a_taken_port_ends_serve_in_one_line(taken: int, tmp_path: Path) -> None:
    result = serve("prefill", str(RECALL_GDN), "--port", str(taken), vllm=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith(
        f"stateferry: --port: cannot listen on port {taken}: something listens there already"
    )
