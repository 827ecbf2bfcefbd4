"""Libraries with their own loaders and samplers: their documented scripts continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries.started import assert_continues, assert_refused

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


_SCRIPTS = [
    "lhotse_cuts.py", "lhotse_lazy.py", "monai_cache.py", "monai_thread.py", "pyg_gin.py", "timm_loaders.py",
    "webdataset_loader.py",
]  # fmt: skip


@pytest.mark.parametrize("name", _SCRIPTS)
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues through any number of starts, with only the environment variable set."""
    assert_continues(name, tmp_path, more=("TERM@8", "KILL@3"))


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
