"""Libraries with their own loaders and samplers: their documented scripts continue."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries.started import assert_continues

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.mark.parametrize("name", ["lhotse_cuts.py", "monai_thread.py", "timm_loaders.py", "webdataset_loader.py"])
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues, with only the environment variable set."""
    assert_continues(name, tmp_path)
