"""What a command would write is looked at before it begins."""

from pathlib import Path

import pytest
from tests.command import run


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("bench", "plan", "--rounds", "5"), "--report"),
        (("bench", "handoff"), "--log-folder"),
        (("demo",), "--log-folder"),
        (("soak",), "--log-folder"),
        (("gate",), "--log-folder"),
        (("gate", "--full"), "--output"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(
    command: tuple[str, ...], option: str, tmp_path: Path
) -> None:
    """Symptom: after the whole run a traceback, exit code 1, and no result."""
    (tmp_path / "file").touch()
    result = run(*command, option, str(tmp_path / "file" / "inside"))
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith(f"stateferry: {option} ")
    assert result.stdout == ""


def test_a_page_does_not_go_where_a_folder_is(tmp_path: Path) -> None:
    result = run("bench", "plan", "--report", str(tmp_path))
    assert (result.returncode, result.stdout) == (2, "")
    assert f"--report '{tmp_path}' is a folder" in result.stderr


def test_made_up_sessions_need_a_folder_that_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("bench", "agentx-sessions", str(tmp_path / "file"), "--count", "1")
    assert result.returncode == 2, result.stderr
    assert "cannot be used (File exists)" in result.stderr


def test_a_report_that_is_there_is_written_anew(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    out.write_text("old")
    result = run("bench", "plan", "--rounds", "5", "--report", str(out))
    assert result.returncode == 0, result.stderr
    assert out.read_text().startswith("<!doctype html>")
