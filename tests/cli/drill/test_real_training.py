from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.cli.drill import result
from tests.cli.drill.real_drills import drill
from tests.kills import files_below

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["TERM", "exception"])  # KILL: the tests below
def test_a_real_training_is_exact(tmp_path: Path, kind: str) -> None:
    """A training with shuffling, dropout, and augmentation is struck, resumes, and ends as if nothing had happened.

    If the script names its run, an existing run of that name stays as it was. One case starts real processes, as a
    shell does.
    """
    own = tmp_path / "fault_tolerance" / "mine" / "fit-1" / "autosave-00000001.ckpt"
    own.parent.mkdir(parents=True)
    own.write_text("of the user")
    found = drill(tmp_path, "--run-id=mine", kind=kind, forks=kind != "TERM")
    assert found.verdict.word == result.EXACT, found.verdict
    [strike] = found.strikes
    assert 0 < strike.resumed_at <= strike.at
    assert strike.exit_code == {"TERM": 143, "exception": 1}[kind]
    assert found.interrupted is not None
    assert found.interrupted.num_validations == 2
    assert files_below(tmp_path / "fault_tolerance") == ["mine/fit-1/autosave-00000001.ckpt"]
    assert own.read_text() == "of the user"


def test_a_real_training_of_two_ranks_is_exact(tmp_path: Path) -> None:
    """Under torchrun, the launcher, both ranks, and their workers are killed together, and both ranks are compared."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = drill(tmp_path, "--devices=2", launcher=launcher, forks=False)
    assert found.verdict.word == result.EXACT, found.verdict
    assert found.interrupted is not None
    assert found.interrupted.num_ranks == 2


def test_a_counter_that_changes_the_augmentation_is_found(tmp_path: Path) -> None:
    """A data set that counts its calls in a plain attribute is distinguished from one that draws, by its cause."""
    found = drill(tmp_path, "--flaw")
    assert found.verdict.word == result.DIFFERS
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "augmentation"
    assert found.verdict.difference is not None
    assert found.verdict.difference.number == found.strikes[0].resumed_at
    assert "order of the samples" in found.verdict.difference.equal


EVERYTHING = "--functions=fit,validate,test,predict"


@pytest.mark.parametrize("kind", ["KILL", "TERM", "exception"])
def test_a_real_script_is_struck_in_all_that_it_does(tmp_path: Path, kind: str) -> None:
    """A script that fits, validates, tests, and predicts is exact, and continues inside each of them."""
    found = drill(tmp_path, EVERYTHING, kind=kind, num_strikes=4)
    assert found.verdict.word == result.EXACT, found.verdict
    assert {strike.stage for strike in found.strikes} == {"train", "validation", "test", "predict"}
    assert all(strike.resumed_batch is not None for strike in found.strikes if strike.stage != "train")
    assert all(strike.num_twice <= 4 for strike in found.strikes)
    assert found.interrupted is not None
    assert found.interrupted.num_evaluated == 5 * 6
    assert files_below(tmp_path / "fault_tolerance") == []


def test_a_validation_run_of_a_real_fit_is_struck_before_named_batches(tmp_path: Path) -> None:
    """With --in and --at, each strike hits exactly there, and nothing is done twice."""
    found = drill(tmp_path, stages=("validation",), at=(2, 9))
    assert found.verdict.word == result.EXACT, found.verdict
    assert [(strike.epoch, strike.batch, strike.resumed_batch) for strike in found.strikes] == [(0, 2, 2), (1, 3, 3)]


def test_real_evaluations_of_two_ranks_are_exact(tmp_path: Path) -> None:
    """Without a fit, under torchrun, both ranks save before the same batch, and both are compared."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = drill(tmp_path, "--devices=2", "--functions=test,predict", launcher=launcher, num_strikes=2)
    assert found.verdict.word == result.EXACT, found.verdict
    assert [strike.stage for strike in found.strikes] == ["test", "predict"]
    assert found.interrupted is not None
    assert (found.interrupted.num_ranks, found.interrupted.num_evaluated) == (2, 6)
