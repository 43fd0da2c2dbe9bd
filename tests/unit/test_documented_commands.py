"""Every command that our pages and examples show is one that we have, with options that it takes."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.documented import PAGES, ROOT, code_lines, commands, refused, router_refuses, typed

TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def problem(words: list[str]) -> str:
    """What is wrong with a command that somebody may type; empty: nothing."""
    if words[0] == "stateferry":
        return refused(words)
    if words[0] == "vllm-router":
        return router_refuses(words)
    unknown = [word for word in words[1:] if "=" not in word and word not in TARGETS]
    return f"no target {unknown}" if unknown else ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    assert {shlex.join(words): found for words in typed(page) if (found := problem(words))} == {}


def test_the_pages_show_commands_at_all() -> None:
    shown = [words for page in PAGES for words in typed(page)]
    assert len(shown) > 20
    assert {words[0] for words in shown} == {"stateferry", "vllm-router", "make"}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("stateferry prove", "no command 'prove'"),
        ("stateferry doctor --prefil-url http://p", "No such option"),
        ("stateferry demo extra", "unexpected extra argument"),
        ("stateferry serve prefill", "Missing argument"),
        ("make everything", "no target"),
        ("vllm-router --vllm-pd-disaggregation --prefill http://p", "requires --decode"),
        ("vllm-router --kv-connector pigeon", "invalid choice"),
        ("vllm-router --selectors a=b", "unknown"),
    ],
)
def test_a_command_that_nobody_can_type_is_noticed(line: str, says: str) -> None:
    (words,) = commands(line)
    assert says.lower() in problem(words).lower()


def test_shell_is_read_as_a_shell_reads_it() -> None:
    page = (
        "```\nstateferry serve decode m \\\n    --port 1 > log 2>&1 &\nmake demo && make test # both\n```\n"
    )
    page += "text stateferry nonsense\n\n    $ stateferry version | head\n"
    found = [words for line in code_lines(page) for words in commands(line)]
    assert found == [
        ["stateferry", "serve", "decode", "m", "--port", "1"],
        ["make", "demo"],
        ["make", "test"],
        ["stateferry", "version"],
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_shell_blocks_are_shell(page: Path) -> None:
    """Blocks that say `sh` are read by the shell itself."""
    for block in re.findall(r"^```(?:sh|bash)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        result = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert result.returncode == 0, f"{result.stderr}\n{block}"


PLACEHOLDER = re.compile(r"\b[A-Z]{4,}\b(?!\.md)")
"""A word that stands for many: `gate-full-DATE.json`."""
NAMED = re.compile(r"`((?:benchmarks|deploy|docs|examples|requirements|src|tests|tools)/[\w./*-]+)")


def missing(page: str) -> list[str]:
    """Files and folders of ours that a page names, and that are not there."""
    named = {name for name in NAMED.findall(page) if not PLACEHOLDER.search(name)}
    return sorted(name for name in named if not list(ROOT.glob(name.rstrip("./"))))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing(page.read_text()) == []


def test_a_file_that_is_not_there_is_noticed() -> None:
    page = "`docs/design.md`, `tests/unit/test_bans.py::test_x`, `tools/gone.py` and `deploy/compose`."
    assert missing(page) == ["tools/gone.py"]


PROGRAM = re.compile(r"python3? ((?:tools|examples)/\w+\.py)([^`|>&\n]*)")
"""A program of ours with its options, in a block or in a sentence."""


def programs(page: str) -> list[str]:
    """What is wrong with the programs of ours that a page tells people to run."""
    found = []
    for name, options in PROGRAM.findall(page):
        text = (ROOT / name).read_text() if (ROOT / name).is_file() else ""
        if not text:
            found.append(f"there is no {name}")
        found += [
            f"{name} has no {o}" for o in re.findall(r"--[\w-]+", options) if text and f'"{o}"' not in text
        ]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_program_that_a_page_runs_is_there_and_takes_its_options(page: Path) -> None:
    assert programs(page.read_text()) == []


def test_a_program_that_nobody_can_run_is_noticed() -> None:
    page = "`python tools/gone.py` and\npython tools/two_hosts.py --delay-ms 5 --lost 1 | cat --not-ours"
    assert programs(page) == ["there is no tools/gone.py", "tools/two_hosts.py has no --lost"]
    assert sum(len(PROGRAM.findall(page.read_text())) for page in PAGES) > 5


def nav(node: object) -> list[str]:
    """The pages that the site's navigation names, in order."""
    if isinstance(node, str):
        return [node]
    inner = node if isinstance(node, list) else list(node.values())  # type: ignore[attr-defined]
    return [page for one in inner for page in nav(one)]


def test_every_page_is_in_the_navigation_and_on_the_index_once() -> None:
    docs = ROOT / "docs"
    pages = sorted(str(page.relative_to(docs)) for page in docs.rglob("*.md"))
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(nav(site["nav"])) == pages
    listed = (docs / "index.md").read_text().partition("## All pages")[2]
    assert sorted(re.findall(r"\]\(([\w/-]+\.md)\)", listed)) == sorted({*pages} - {"index.md"})


def test_the_readme_names_every_page_of_the_documentation_that_it_lists_once() -> None:
    listed = re.findall(r"`(docs/\w+\.md)`", (ROOT / "README.md").read_text().partition("## More")[2])
    assert sorted(listed) == sorted(set(listed))
