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


def build(
    directory: Path,
    *,
    in_wheel: Mapping[str, str] = NOTHING,
    in_sdist: Mapping[str, str] = NOTHING,
    tracked: tuple[str, ...] = (),
) -> list[str]:
    """Build a wheel and an sdist that are right except for the arguments, and return the problems found."""
    info = (f"{INFO}/{name}" for name in CONTENTS["IN_DIST_INFO"])
    with zipfile.ZipFile(directory / "lightning_faulttolerant-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {FILES[0]: "", **dict.fromkeys(info, ""), **in_wheel}.items():
            wheel.writestr(name, text)
    with tarfile.open(directory / "lightning_faulttolerant-1.0.tar.gz", "w:gz") as sdist:
        for name, text in {**dict.fromkeys(FILES, ""), "PKG-INFO": "", **in_sdist}.items():
            member = tarfile.TarInfo(f"lightning_faulttolerant-1.0/{name}")
            member.size = len(text)
            sdist.addfile(member, io.BytesIO(text.encode()))
    problems: list[str] = CONTENTS["problems"](directory, [*FILES, "a-wheel-that-was-left.whl", *tracked])
    return problems


NEW = ("examples/new.py", "lightning_faulttolerant/new.py")
WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    ({"in_wheel": {"tests/test_it.py": ""}}, ["wheel: tests/test_it.py does not belong there"]),
    ({"in_wheel": {f"{INFO}/notes.txt": ""}}, ["wheel's dist-info: notes.txt does not belong there"]),
    ({"in_sdist": {"tests/__pycache__/x.pyc": ""}}, ["sdist: tests/__pycache__/x.pyc does not belong there"]),
    ({"in_sdist": {"docs/index.md": "x" * 600_000}}, ["sdist: docs/index.md has 600,000 bytes"]),
    ({"tracked": NEW}, [f"wheel: {NEW[1]} is missing", *(f"sdist: {name} is missing" for name in NEW)]),
]


@pytest.mark.parametrize(("wrong", "problems"), WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, wrong: dict[str, Any], problems: list[str]) -> None:
    """An extra or missing file, and one that is too large are each named."""
    assert build(tmp_path, **wrong) == problems
