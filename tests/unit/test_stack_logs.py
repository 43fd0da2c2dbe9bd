"""What is made of the log of a server that did not start."""

from pathlib import Path

import pytest

from stateferry.stack.logs import errors, explain, plain, tail

LOG = """$ python -m vllm.entrypoints.openai.api_server
(APIServer pid=2) WARNING 11-29 23:38:45 [system_utils.py:255] errors like `OSError: [Errno 24] Too many`
(VllmWorker-0 pid=3) ERROR 11-29 23:39:06 [executor.py:953] WorkerProc failed to start.
(VllmWorker-0 pid=3) ERROR 11-29 23:39:06 [executor.py:953] Traceback (most recent call last):
(VllmWorker-0 pid=3) ERROR 11-29 23:39:06 [executor.py:953] subprocess.CalledProcessError: lscpu 127
(EngineCore pid=4) ERROR 11-29 23:39:08 [core.py:1510] subprocess.CalledProcessError: lscpu 127
(EngineCore pid=4) ERROR 11-29 23:39:08 [core.py:1510] RuntimeError: WorkerProc initialization failed due to
stateferry.errors.ConfigError: unknown key 'colour'
stateferry.errors.TransportUnavailable: no nixl
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_causes_are_named_once_and_consequences_not() -> None:
    assert errors(LOG) == [
        "subprocess.CalledProcessError: lscpu 127",
        "stateferry.errors.ConfigError: unknown key 'colour'",
        "stateferry.errors.TransportUnavailable: no nixl",
    ]


def test_an_explanation_has_errors_advice_path_and_end(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text(LOG)
    text = explain(path, lines=2)
    assert "Errors in its log:\n  subprocess.CalledProcessError" in text
    assert "Hint: vLLM needs the program lscpu" in text
    assert text.endswith("\n".join([f"Its log is {path} and ends with:", *LOG.splitlines()[-2:]]))


def test_a_log_without_errors_is_only_shown(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("loading\n")
    assert explain(path) == f"Its log is {path} and ends with:\nloading"


def test_no_log_is_an_empty_tail(tmp_path: Path) -> None:
    assert tail(tmp_path / "none", 5) == ""


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("(Worker pid=6) INFO 11-29 23:10:01 [loader.py:5] Loading took 0.01 s", "Loading took 0.01 s"),
        ("\x1b[32mINFO\x1b[0m 2026 text", "INFO 2026 text"),
        ("INFO:     Waiting", "INFO:     Waiting"),
    ],
)
def test_vllms_prefix_is_left_out(line: str, text: str) -> None:
    assert plain(line) == text
