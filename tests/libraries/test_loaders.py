"""Libraries with their own loaders and samplers: their documented scripts continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries.started import assert_continues

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.mark.parametrize("name", ["lhotse_cuts.py", "timm_loaders.py", "webdataset_loader.py"])
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues, with only the environment variable set."""
    assert_continues(name, tmp_path)


@pytest.mark.parametrize("name", ["lhotse_lazy.py", "monai_thread.py", "pyg_gin.py"])
def test_continues_through_many_starts(name: str, tmp_path: Path) -> None:
    """A cache in a worker, a thread that reads ahead, and lazy cuts continue after each further interruption, too."""
    assert_continues(name, tmp_path, more=("TERM@8", "KILL@3"))
