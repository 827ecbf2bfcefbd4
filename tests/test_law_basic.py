"""The law on the smallest run."""

from __future__ import annotations

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.laws.data_sets import NoisyDataset
from tests.runs import fit_net


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_in_the_middle_of_an_epoch(num_workers: int) -> None:
    """A run that is killed in the middle of an epoch continues exactly."""

    def fit(callbacks, directory):
        loader = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net(callbacks, directory, train=loader)

    [cost] = assert_resumes_exactly(fit, [KillAt(5)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (-9, 0, 5, 1)


class Fails(Callback):
    """Raises an error before the third batch."""

    num_begun = 0

    def on_train_batch_start(self, *_):
        self.num_begun += 1
        assert self.num_begun < 3


def test_a_fault_counts_what_happens_in_its_process() -> None:
    """A user's callback that interrupts a run does not continue with it."""
    costs = assert_resumes_exactly(fit_net, [Fails(), Fails()], options={"every_n_train_steps": 1})
    assert [cost.batch for cost in costs] == [2, 4]
