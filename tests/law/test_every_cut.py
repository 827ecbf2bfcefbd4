"""The law at every cut: a short run is killed at each of its batches in turn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import HoldingDataset
from tests.runs import fit_net

NUM_BATCHES = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning"),
]
each_num_workers = pytest.mark.parametrize("num_workers", [0, 2])


def fit_short(callbacks: list[Callback], directory: Path, *, num_workers: int) -> Trainer:
    """Fit 2 epochs of 6 batches, with validation; everything is shuffled and draws random numbers."""

    def loader(length: int) -> DataLoader:
        return DataLoader(
            HoldingDataset(length),
            batch_size=4,
            shuffle=True,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )

    return fit_net(callbacks, directory, train=loader(4 * NUM_BATCHES), validation=loader(8))


@each_num_workers
@pytest.mark.parametrize("every", [1, 5])
@pytest.mark.parametrize("hook", ["start", "end"])
def test_killed_at_every_batch(hook: str, every: int, num_workers: int) -> None:
    """Killed at each batch in turn, one run continues exactly each time, from the newest autosave."""
    kills = range(2 * NUM_BATCHES)
    resumed = [kill - kill % every for kill in kills]
    costs = assert_resumes_exactly(
        lambda callbacks, directory: fit_short(callbacks, directory, num_workers=num_workers),
        [KillAt(kill - begin, hook=hook) for kill, begin in zip(kills, [0, *resumed[:-1]], strict=True)],
        options={"every_n_train_steps": every},
        may_start_over=True,  # if it does, it is at batch 0
    )
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL] * len(kills)
    assert [(cost.epoch, cost.batch) for cost in costs] == [divmod(batch, NUM_BATCHES) for batch in resumed]


@each_num_workers
@pytest.mark.parametrize("kill", [NUM_BATCHES - 1, 2 * NUM_BATCHES - 1])
def test_killed_in_every_validation(kill: int, num_workers: int) -> None:
    """A run that is killed in validation repeats the batch before it, and the whole validation."""
    [cost] = assert_resumes_exactly(
        lambda callbacks, directory: fit_short(callbacks, directory, num_workers=num_workers),
        [KillAt(kill, hook="validation")],
        options={"every_n_train_steps": 1},
    )
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@each_num_workers
@pytest.mark.parametrize("every", [1, 2])
def test_three_interruptions(every: int, num_workers: int) -> None:
    """A run that is interrupted three times, by kills and by a stop, continues exactly each time."""
    costs = assert_resumes_exactly(
        lambda callbacks, directory: fit_short(callbacks, directory, num_workers=num_workers),
        [KillAt(4), KillAt(1, signum=signal.SIGTERM), KillAt(3)],
        options={"every_n_train_steps": every},
    )
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL, 143, -signal.SIGKILL]
    # Killed in batch 4; stopped after batch 5, before its validation; killed three batches on.
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 4), (0, NUM_BATCHES), (1, 3 - 3 % every)]
