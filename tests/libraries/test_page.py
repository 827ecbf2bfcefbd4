"""The page about libraries names the tested ones, with their versions."""

from __future__ import annotations

import re

from tests.libraries.started import HERE, ROOT


def test_page_about_libraries() -> None:
    """Each script is in the table of docs/libraries.md once, with the installed version of its library."""
    page = (ROOT / "docs" / "libraries.md").read_text()
    pins = set(re.findall(r"==(\S+)", (ROOT / "requirements" / "libraries.txt").read_text()))
    rows = re.findall(r"^\| \[.*?\| (\S+) \|.*`(\w+\.py)` \|$", page, re.MULTILINE)
    assert sorted(script for _, script in rows) == sorted(path.name for path in (HERE / "scripts").glob("*.py"))
    assert {version for version, _ in rows} <= pins
    tests = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert all(f'"{script}"' in tests for _, script in rows)
