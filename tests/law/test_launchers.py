"""However the ranks are started, a run that is killed goes on exactly: by Lightning's launchers, and by torchrun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.testing.processes import run_ranks
from tests.launched import NUM_RANKS, assert_same, train
from tests.processes import Ended, run
from tests.rank_runs import for_ranks

pytestmark = for_ranks
ROOT = Path(__file__).parents[2]
SECONDS = 60.0


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Return where a script of two fits, which is neither protected nor interrupted, left what it did."""
    directory = tmp_path / "whole"
    directory.mkdir()
    outputs = [tmp_path / f"whole-{rank}.txt" for rank in range(NUM_RANKS)]
    exit_code = run_ranks(
        lambda rank: train(directory, protected=False, num_fits=2), outputs=outputs, seed=1, timeout_seconds=SECONDS
    )
    assert exit_code == 0, [output.read_text() for output in outputs]
    return directory


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return where the script that is killed works."""
    found = tmp_path / "killed"
    found.mkdir()
    return found


def forked(directory: Path, **arguments: Any) -> Ended:
    """Run the script, whose ranks Lightning forks, and what Python does at its end."""
    return run(lambda: print(train(directory, strategy="ddp_fork", **arguments)[-1].resume_report))


def test_forked_ranks_go_on(whole: Path, directory: Path) -> None:
    """Under ddp_fork the second fit, of which a rank is killed, goes on exactly; nothing is left behind."""
    assert forked(directory, kill_fit=1, num_fits=2).exit_code == 1
    assert_same(whole, directory, fit=0, num_processes=1)
    ended = forked(directory, num_fits=2, seed=7)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output.splitlines()[-1], ended.output
    assert_same(whole, directory, fit=1)
    assert not (directory / "autosaves").exists()
