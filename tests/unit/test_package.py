"""The wheel that people install: what is in it, and that it works away from the source."""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Collection
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path
from types import ModuleType

import pytest
from tests.programs import loaded

ROOT = Path(__file__).parents[2]
EXTRAS = {"cpu", "cuda", "rocm", "mooncake", "dev"}
"""At least these."""


def source_files() -> set[str]:
    """What of `src` git tracks or would track, as paths inside the package."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "src"]
    output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {name.removeprefix("src/") for name in output.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that no build folder appears in the source."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE", *(f"src/{name}" for name in source_files())):
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    made = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(made)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    (found,) = made.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", str(wheel), "--no-deps", "--no-index"]
    command += ["--disable-pip-version-check", "--target", str(folder)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return folder


def problems(names: Collection[str], metadata: str, entry_points: str) -> list[str]:
    """What is wrong with a wheel; empty: nothing."""
    found = []
    packaged = {name for name in names if name.startswith("stateferry/")}
    if missing := source_files() - packaged:
        found.append(f"missing: {sorted(missing)}")
    if strange := packaged - source_files():
        found.append(f"not from the source: {sorted(strange)}")
    if others := {name.split("/")[0] for name in names} - {"stateferry"} - _dist_info(names):
        found.append(f"installs more than the package: {sorted(others)}")
    if "stateferry/py.typed" not in names:
        found.append("no py.typed: type checkers would ignore our types")
    headers = Parser().parsestr(metadata)
    if lost := EXTRAS - set(headers.get_all("Provides-Extra", [])):
        found.append(f"extras are missing: {sorted(lost)}")
    plain = [text for text in headers.get_all("Requires-Dist", []) if "extra ==" not in text]
    if heavy := [text for text in plain if text.startswith(("torch", "vllm", "nixl"))]:
        found.append(f"needs {heavy} without an extra: whoever runs vLLM has chosen a build of it")
    points = ConfigParser()
    points.read_string(entry_points)
    if not points.has_option("vllm.general_plugins", "stateferry"):
        found.append("no vllm.general_plugins entry point: vLLM would not find the connector")
    if not points.has_option("console_scripts", "stateferry"):
        found.append("no stateferry command")
    return found


def _dist_info(names: Collection[str]) -> set[str]:
    return {top for name in names if (top := name.split("/")[0]).endswith(".dist-info")}


def read(wheel: Path) -> tuple[list[str], str, str]:
    """Names of its files, its METADATA and its entry_points.txt."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (folder,) = _dist_info(names)
        texts = [archive.read(f"{folder}/{name}").decode() for name in ("METADATA", "entry_points.txt")]
    return names, texts[0], texts[1]


def test_the_wheel_holds_the_package_and_says_how_to_use_it(wheel: Path) -> None:
    assert problems(*read(wheel)) == []


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("py.typed", "no py.typed"),
        ("model", "missing: .*recall_gdn"),
        ("stray", "not from the source"),
        ("tests", "installs more"),
        ("plugin", "no vllm.general_plugins"),
        ("command", "no stateferry command"),
        ("extra", "extras are missing"),
        ("torch", "without an extra"),
    ],
)
def test_a_damaged_wheel_is_noticed(wheel: Path, what: str, says: str) -> None:
    names, metadata, points = read(wheel)
    if what == "py.typed":
        names.remove("stateferry/py.typed")
    elif what == "model":
        names = [name for name in names if "recall_gdn/" not in name]
    elif what == "stray":
        names.append("stateferry/old.py")
    elif what == "tests":
        names.append("tests/conftest.py")
    elif what == "plugin":
        points = points.replace("[vllm.general_plugins]", "[vllm.other_plugins]")
    elif what == "command":
        points = points.replace("[console_scripts]", "[other_scripts]")
    elif what == "extra":
        metadata = metadata.replace("Provides-Extra: cpu\n", "")
    else:
        metadata = metadata.replace("Requires-Dist: httpx", "Requires-Dist: torch>=2\nRequires-Dist: httpx")
    found = problems(names, metadata, points)
    assert any(re.search(says, text) for text in found), found


def run_installed(folder: Path, code: str) -> str:
    """Run code with the installed package first on the path, isolated from the source and the environment."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    result = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_installed_package_is_the_one_that_was_tested(installed: Path) -> None:
    found = run_installed(installed, "import stateferry; print(stateferry.__file__)")
    assert Path(found) == installed / "stateferry" / "__init__.py"


def test_finding_our_plugin_loads_neither_torch_nor_vllm(installed: Path) -> None:
    """vLLM loads the entry point in every process; what it registers is imported when it is named."""
    code = f"""
import importlib.metadata as m
(point,) = [p for d in m.distributions(path=[{str(installed)!r}]) for p in d.entry_points
            if p.group == "vllm.general_plugins"]
point.load()
print([name for name in ("torch", "vllm") if name in sys.modules])
"""
    assert run_installed(installed, code) == "[]"


def test_the_installed_command_lists_its_commands(installed: Path) -> None:
    code = "sys.argv = ['stateferry', '--help']\nfrom stateferry.cli.main import main\nmain()"
    for command in ("serve", "doctor", "gate", "inspect", "key"):
        assert command in run_installed(installed, code)


def test_the_installed_model_is_whole(installed: Path) -> None:
    code = "from stateferry.models import RECALL_GDN; print((RECALL_GDN / 'config.json').stat().st_size > 0)"
    assert run_installed(installed, code) == "True"


@pytest.fixture
def tool() -> ModuleType:
    return loaded(ROOT / "tools" / "check_package.py")


def test_make_package_installs_every_extra(tool: ModuleType) -> None:
    """Symptom: three extras were only resolved, for no reason that held."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert extras == set(tool.PROBLEMS) - {"bare"}
    assert set(tool.PROBLEMS) == set(tool.BRINGS)


@pytest.mark.parametrize(
    ("found", "says"),
    [("0.3.13 (mooncake-transfer-engine-non-cuda)", []), ("not installed, needed for x", ["mooncake"])],
)
def test_an_extra_whose_library_the_doctor_does_not_find_is_noticed(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: str, says: list[str]
) -> None:
    told = {
        "problems": ["torch: not installed", "vllm: not installed"],
        "findings": [{"name": "mooncake", "found": found}],
    }

    def run(*command: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
        answers = {"version": "{}", "-I": "[]", "doctor": json.dumps(told)}
        return subprocess.CompletedProcess(command, command[1] == "doctor", answers[str(command[1])])

    monkeypatch.setattr(tool, "run", run)
    problems = tool.examine(tmp_path / "python", "mooncake", tmp_path)
    assert problems == [f"doctor does not find {says}" for _ in says]
