"""The law if a callback iterates over the trainer's own loaders during training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset, UnpackingLoader
from tests.processes import run
from tests.runs import fit_net
from tests.scripts import protected


class LooksAtTheData(Callback):
    """Iterates over the trainer's own loaders in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (2, 5):
            for loader in (trainer.train_dataloader, trainer.val_dataloaders):
                iterator = iter(loader)
                next(iterator)
                next(iterator)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cut", [3, *(pytest.param(cut, marks=pytest.mark.slow) for cut in (5, 11))])
def test_callback_that_iterates_over_the_loaders(cut: int, num_workers: int) -> None:
    """A callback that iterates over the trainer's loaders does not disturb the saved state of the training."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        train = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        validation = DataLoader(NoisyDataset(8), batch_size=4, num_workers=num_workers)
        return fit_net([*callbacks, LooksAtTheData()], directory, train=train, validation=validation)

    assert_resumes_exactly(fit, [KillAt(cut)], options={"every_n_train_steps": 1})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_beside_a_loader_whose_iterations_begin_late(num_workers: int) -> None:
    """The same holds for a subclass whose __iter__ is a generator, which starts at the first fetch."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        train = UnpackingLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net([*callbacks, LooksAtTheData()], directory, train=train)

    assert_resumes_exactly(fit, [KillAt(11)], options={"every_n_train_steps": 1})


def test_persistent_workers_that_are_taken_away_are_an_error(tmp_path: Path) -> None:
    """Persistent workers serve one iteration, so code that takes them from the training gets an error."""

    def main() -> None:
        train = DataLoader(NoisyDataset(), batch_size=4, num_workers=2, persistent_workers=True)
        fit_net([protected(), LooksAtTheData()], tmp_path, train=train)

    ended = run(main)
    assert ended.exit_code == 1
    assert "NotExactError" in ended.output
