"""Libraries of models: their documented scripts continue as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries.started import assert_continues

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.mark.parametrize(
    "name", ["chemprop_train.py", "lightly_simclr.py", "pyro_svi.py", "scvi_model.py", "transformers_glue.py"]
)
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues, with only the environment variable set."""
    assert_continues(name, tmp_path)
