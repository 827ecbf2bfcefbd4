"""Checks the built wheel and sdist: nothing is missing, and nothing extra is included.

    python tests/release/contents.py dist/

The files that git tracks belong. It needs only Python's standard library.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "lightning_faulttolerant"
# Also in the sdist, since the tests run from there.
PARTS = ("docs", "examples", "benchmarks", "requirements", "tests", PACKAGE)
FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "mkdocs.yml", "pyproject.toml")
FROM_THE_BUILD = {"PKG-INFO", ".gitignore"}
IN_DIST_INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
MAX_FILE_BYTES = 500_000
MAX_WHEEL_BYTES = 1_500_000  # 332 modules take 1,060,000


def problems(directory: Path, tracked: Iterable[str]) -> list[str]:
    """Return the problems of the wheel and the sdist in `directory`, in words.

    Args:
        directory: The directory of both.
        tracked: The files that belong in them, as paths from the root of the checkout.
    """
    [wheel], [sdist] = directory.glob("*.whl"), directory.glob("*.tar.gz")
    in_wheel, in_sdist = sizes_of_wheel(wheel), sizes_of_sdist(sdist)
    belongs = {path for path in tracked if path.partition("/")[0] in PARTS or path in FILES}
    info = {path for path in in_wheel if ".dist-info/" in path}
    found = _differences("wheel", in_wheel.keys() - info, {path for path in belongs if path.startswith(f"{PACKAGE}/")})
    found += _differences("wheel's dist-info", {path.partition(".dist-info/")[2] for path in info}, IN_DIST_INFO)
    found += _differences("sdist", in_sdist.keys() - FROM_THE_BUILD, belongs)
    for kind, sizes in (("wheel", in_wheel), ("sdist", in_sdist)):
        found += [f"{kind}: {path} has {size:,} bytes" for path, size in sizes.items() if size > MAX_FILE_BYTES]
    if wheel.stat().st_size > MAX_WHEEL_BYTES:
        found.append(f"the wheel has {wheel.stat().st_size:,} bytes")
    if not sdist.name.endswith(f"-{wheel.name.split('-')[1]}.tar.gz"):
        found.append(f"{wheel.name} and {sdist.name} are of different versions")
    return found


def sizes_of_wheel(wheel: Path) -> dict[str, int]:
    """Return the files in a wheel and their sizes."""
    with zipfile.ZipFile(wheel) as archive:
        return {each.filename: each.file_size for each in archive.infolist() if not each.is_dir()}


def sizes_of_sdist(sdist: Path) -> dict[str, int]:
    """Return the files in an sdist, as paths below its one directory, and their sizes."""
    with tarfile.open(sdist) as archive:
        return {each.name.partition("/")[2]: each.size for each in archive.getmembers() if each.isfile()}


def _differences(kind: str, found: Iterable[str], expected: Iterable[str]) -> list[str]:
    missing, extra = set(expected) - set(found), set(found) - set(expected)
    return [f"{kind}: {path} is missing" for path in sorted(missing)] + [
        f"{kind}: {path} does not belong there" for path in sorted(extra)
    ]


def tracked_files() -> list[str]:
    """Return the files of the checkout that git tracks and that exist."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [path for path in listed if path and (ROOT / path).is_file()]


def main(arguments: list[str]) -> int:
    """Print the problems."""
    found = problems(Path(arguments[0]), tracked_files())
    print("\n".join(found) or "The wheel and the sdist have what belongs there.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
