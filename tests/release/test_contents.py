"""The check of wheel and sdist notices missing and extra files."""

from __future__ import annotations

import io
import runpy
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

CONTENTS = runpy.run_path(str(Path(__file__).with_name("contents.py")))
NOTHING: Mapping[str, str] = MappingProxyType({})
INFO = "lightning_faulttolerant-1.0.dist-info"
FILES = ["lightning_faulttolerant/__init__.py", "tests/test_it.py", "docs/index.md", "pyproject.toml"]
METADATA = "\n".join(
    [
        "Name: lightning-faulttolerant",
        "Version: 1.0",
        "Summary: It continues.",
        "Keywords: lightning",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.10",
        "Description-Content-Type: text/markdown",
        "",
        "# It continues",
    ]
)


def build(
    directory: Path,
    *,
    in_wheel: Mapping[str, str] = NOTHING,
    in_sdist: Mapping[str, str] = NOTHING,
    metadata: str = METADATA,
) -> list[str]:
    """Build a wheel and an sdist that are right except for the arguments, and return the problems found."""
    directory.mkdir(exist_ok=True)
    with zipfile.ZipFile(directory / "lightning_faulttolerant-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(FILES[0], "")
        for name in ("RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"):
            wheel.writestr(f"{INFO}/{name}", "")
        wheel.writestr(f"{INFO}/METADATA", metadata)
        for name, text in in_wheel.items():
            wheel.writestr(name, text)
    with tarfile.open(directory / "lightning_faulttolerant-1.0.tar.gz", "w:gz") as sdist:
        for name, text in {**dict.fromkeys(FILES, ""), "PKG-INFO": "", **in_sdist}.items():
            member = tarfile.TarInfo(f"lightning_faulttolerant-1.0/{name}")
            member.size = len(text)
            sdist.addfile(member, io.BytesIO(text.encode()))
    problems: list[str] = CONTENTS["problems"](directory, [*FILES, "a-wheel-that-was-left.whl"])
    return problems


def test_what_belongs_is_right(tmp_path: Path) -> None:
    """Nothing is wrong if the wheel has the package and the sdist has all files but stray ones."""
    assert build(tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"in_wheel": {"tests/test_it.py": ""}}, "wheel: tests/test_it.py does not belong there"),
        ({"in_wheel": {f"{INFO}/notes.txt": ""}}, "wheel's dist-info: notes.txt does not belong there"),
        ({"in_sdist": {"tests/__pycache__/x.pyc": ""}}, "sdist: tests/__pycache__/x.pyc does not belong there"),
        ({"in_sdist": {"docs/index.md": "x" * 600_000}}, "sdist: docs/index.md has 600,000 bytes"),
        ({"metadata": METADATA.replace("Apache", "MIT")}, "metadata: License-Expression is 'MIT-2.0'"),
        ({"metadata": METADATA.replace("Summary", "Title")}, "metadata: Summary is missing"),
        ({"metadata": METADATA.replace("# It continues", "")}, "metadata: the README is not its description"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: dict[str, Any], problem: str) -> None:
    """An extra file, one that is too large, and metadata that an index would refuse are each named."""
    assert build(tmp_path, **wrong) == [problem]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """A tracked file that a build has left out is named."""
    build(tmp_path)
    problems = CONTENTS["problems"](tmp_path, [*FILES, "examples/new.py", "lightning_faulttolerant/new.py"])
    assert problems == [
        "wheel: lightning_faulttolerant/new.py is missing",
        "sdist: examples/new.py is missing",
        "sdist: lightning_faulttolerant/new.py is missing",
    ]
