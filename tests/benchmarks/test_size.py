from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import size


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_our_part_of_an_autosave_is_small(num_workers: int, tmp_path: Path) -> None:
    """With all global generators drawn from, in every process, it is at most 20 kB and 15 kB a worker."""
    found = size.measure(num_workers, steps=200, directory=tmp_path)
    assert 0 < found["bytes"] <= 20_000 + 15_000 * num_workers
