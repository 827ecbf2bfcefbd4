"""Libraries for time series: their documented scripts continue as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.libraries.started import assert_continues

pytestmark = [pytest.mark.slow, pytest.mark.timeout(480)]


@pytest.mark.parametrize("name", ["forecasting.py", "gluonts_deepar.py", "darts_nbeats.py", "neuralforecast_nhits.py"])
def test_continues(name: str, tmp_path: Path) -> None:
    """An unchanged script continues, with only the environment variable set."""
    assert_continues(name, tmp_path)
