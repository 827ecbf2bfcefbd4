"""Autosaves of earlier versions of the package are resumed from, exactly."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lightning_faulttolerant import FaultTolerance
from tests.law.earlier_versions.runs import FILES, RUNS, SEED, KeptRun
from tests.rank_runs import for_ranks

pytestmark = [
    *for_ranks,
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before"),  # without the callback
    pytest.mark.filterwarnings("ignore:The loaded checkpoint was produced with Lightning"),  # on the oldest
]


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=run.name, marks=[pytest.mark.slow] if run.num_ranks > 1 else []) for run in RUNS],
)
def test_a_file_of_an_earlier_version_is_resumed_from(run: KeptRun, tmp_path: Path) -> None:
    """All weights, batches, and draws are those of the uninterrupted run; without the callback they are not."""
    files = sorted(FILES.glob(f"{run.name}-*.ckpt"))
    assert files
    whole = run.start(tmp_path / "whole", seed=SEED)
    for file in files:
        copy = Path(shutil.copy(file, tmp_path))
        assert run.start(tmp_path / file.stem, FaultTolerance(), seed=SEED + 1, ckpt_path=copy) == whole
        assert run.start(tmp_path / f"{file.stem}-without", seed=SEED + 1, ckpt_path=copy) != whole
