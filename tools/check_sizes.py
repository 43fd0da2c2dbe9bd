"""Print how long our files are, and fail if one is too long to be read in one sitting."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTED = 300
FORBIDDEN = 500
FOLDERS = ("src", "tests", "tools")


def main() -> int:
    sizes = {path: count_lines(ROOT / path) for path in python_files()}
    for folder in FOLDERS:
        ours = sorted(size for path, size in sizes.items() if path.startswith(f"{folder}/"))
        if ours:
            print(
                f"{folder:6} {len(ours):4} files {sum(ours):6} lines   "
                f"median {ours[len(ours) // 2]}, longest {ours[-1]}"
            )
    long = {path: size for path, size in sizes.items() if size > LISTED}
    for path, size in sorted(long.items(), key=lambda item: -item[1]):
        print(f"  over {LISTED} lines: {path} ({size})")
    too_long = [path for path, size in long.items() if size > FORBIDDEN]
    for path in too_long:
        print(f"{path} has more than {FORBIDDEN} lines: split it", file=sys.stderr)
    return 1 if too_long else 0


def python_files() -> list[str]:
    """Files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return [name for name in names if name and (ROOT / name).exists()]


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


if __name__ == "__main__":
    sys.exit(main())
