"""The law on the smallest run."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.runs import fit_net


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_in_the_middle_of_an_epoch(num_workers: int) -> None:
    """A run that is killed in the middle of an epoch continues exactly."""

    def fit(callbacks, directory):
        loader = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net(callbacks, directory, train=loader)

    [cost] = assert_resumes_exactly(fit, [KillAt(5)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (-9, 0, 5, 1)
