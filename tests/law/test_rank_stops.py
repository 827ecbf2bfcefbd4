"""Several ranks that get a stop signal stop and save at one place, and resume from there exactly."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import Interruption, KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.rank_runs import SECONDS, Slowly, for_ranks, rank_fit

pytestmark = for_ranks

TERM, INT = signal.SIGTERM, signal.SIGINT


def stop_ranks(faults: Sequence[Any], *, options: Mapping[str, Any] | None = None, **arguments: Any) -> Interruption:
    """Check that a run of two ranks that is stopped once obeys the law, and return the cost."""
    fit = rank_fit(2, users=lambda: [Slowly()], **arguments)
    chosen = {"train_time_interval": timedelta(hours=1), **(options or {})}
    [cost] = assert_resumes_exactly(fit, [list(faults)], options=chosen, num_ranks=2, timeout_seconds=SECONDS)
    return cost


@pytest.mark.parametrize(
    ("faults", "code"),
    [
        pytest.param([KillAt(3, signum=TERM, rank=1)], 143, id="another-rank"),
        pytest.param([KillAt(3, signum=INT, rank=0)], 130, id="rank-0", marks=pytest.mark.slow),
        pytest.param([KillAt(3, signum=TERM)], 143, id="all", marks=pytest.mark.slow),
        pytest.param(
            [KillAt(3, signum=TERM, rank=0), KillAt(4, signum=TERM, rank=1)],
            143,
            id="staggered",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [KillAt(9, signum=TERM, rank=1), KillAt(9, signum=TERM, rank=1, hook="end")],
            143,
            id="twice",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_ranks_that_are_asked_to_stop_in_training(faults: list[KillAt], code: int) -> None:
    """Whichever ranks get the signal, all save at one boundary and end with its code; no batch runs twice."""
    cost = stop_ranks(faults)
    assert (cost.exit_code, cost.num_batches_twice) == (code, 0)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.slow
def test_rank_that_is_asked_to_stop_in_validation(rank: int) -> None:
    """All ranks end inside the validation run, before the same batch, and continue there."""

    def validation() -> DataLoader[Any]:
        return DataLoader(NoisyDataset(4 * 40), batch_size=4)

    cost = stop_ranks([KillAt(7, signum=TERM, rank=rank, hook="validation")], validation=validation)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (143, 0, 8, 0)
    assert cost.num_validation_batches_twice == 0


@pytest.mark.slow
def test_stop_in_an_accumulation_window() -> None:
    """The gradients of a window that is stopped midway continue."""
    cost = stop_ranks([KillAt(4, signum=TERM, rank=1)], accumulate_grad_batches=3)
    assert (cost.exit_code, cost.num_batches_twice) == (143, 0)


class TermIn(Callback):
    """Sends SIGTERM to rank 1 in a hook."""

    def __init__(self, hook: str) -> None:
        self._hook = hook

    def _strike(self, hook: str, trainer: Trainer) -> None:
        if hook == self._hook and trainer.global_rank == 1:
            signal.raise_signal(signal.SIGTERM)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self._strike("on_train_epoch_end", trainer)

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._strike("on_train_end", trainer)


@pytest.mark.slow
def test_stop_at_the_end_of_an_epoch() -> None:
    """A stop that one rank gets between two epochs takes effect at the first boundaries of the next."""
    cost = stop_ranks([TermIn("on_train_epoch_end")])
    assert (cost.exit_code, cost.epoch, cost.num_batches_twice) == (143, 1, 0)


@pytest.mark.slow
def test_saves_by_time_are_at_one_boundary() -> None:
    """If time decides about saves, rank 0 requests them, and all ranks save at the agreed boundary."""
    options = {"train_time_interval": timedelta(seconds=0.05)}
    cost = stop_ranks([KillAt(14, rank=1)], options=options)
    assert cost.exit_code == -signal.SIGKILL
    assert (cost.epoch, cost.batch) != (0, 0)
