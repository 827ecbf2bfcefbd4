"""Scripts from the documentation of libraries continue as if nothing had happened, and the page names them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.libraries.started import HERE, ROOT, assert_continues, assert_refused

SCRIPTS = sorted(path.name for path in (HERE / "scripts").glob("*.py"))
# Libraries with their own loaders and samplers: more interruptions.
LOADERS = ("lhotse", "monai", "pyg", "timm", "webdataset")


@pytest.mark.slow
@pytest.mark.timeout(480)
@pytest.mark.parametrize("name", SCRIPTS)
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues through any number of starts, with only the environment variable set."""
    assert_continues(name, tmp_path, more=("TERM@8", "KILL@3") if name.startswith(LOADERS) else ())


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_refused(tmp_path: Path) -> None:
    """What MONAI's threads fill is refused before a batch is trained; with what the message says, the script runs."""
    loader = "DataLoader(dataset, batch_size=4, shuffle=True, num_workers="
    reasons = {
        ("CacheDataset(images, transform, runtime_cache=True", "monai.data.SmartCacheDataset(images, transform"): (
            "Use MONAI's CacheDataset"
        ),
        (f"{loader}2", f"monai.data.Thread{loader}0"): "Pass num_workers=1: then a process loads them",
    }
    assert_refused("monai_cache.py", tmp_path, reasons)


def test_page_about_libraries() -> None:
    """Each script is in the table of docs/libraries.md once, with the installed version of its library."""
    page = (ROOT / "docs" / "libraries.md").read_text()
    pins = set(re.findall(r"==(\S+)", (ROOT / "requirements" / "libraries.txt").read_text()))
    rows = re.findall(r"^\| \[.*?\| (\S+) \|.*`(\w+\.py)` \|$", page, re.MULTILINE)
    assert sorted(script for _, script in rows) == SCRIPTS
    assert {version for version, _ in rows} <= pins
