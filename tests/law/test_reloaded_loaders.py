"""Loaders that Lightning requests each epoch: old ones are freed, and a CombinedLoader may be returned again."""

from __future__ import annotations

import gc
import multiprocessing
import random
import signal
import weakref
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.runs import Net, each_num_workers, make_trainer


class Anew(Net):
    """Creates its data set and its loader each time, and counts the existing ones at the end of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.data_sets: list[Any] = []
        self.num_there: list[tuple[int, int]] = []

    def train_dataloader(self) -> Any:
        data_set = NoisyDataset(8)
        self.data_sets.append(weakref.ref(data_set))
        return DataLoader(data_set, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    def on_train_epoch_end(self) -> None:
        gc.collect()
        alive = sum(reference() is not None for reference in self.data_sets)
        self.num_there.append((alive, len(multiprocessing.active_children())))


def test_loaders_of_before_go(tmp_path: Path) -> None:
    """Neither the data set nor the workers of a replaced loader are kept."""
    module = Anew()
    protected = FaultTolerance(tmp_path / "autosaves", run_id="a")
    trainer = make_trainer([protected], tmp_path, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, val_dataloaders=DataLoader(NoisyDataset(8), batch_size=4))
    assert module.num_there == [(1, 1)] * 4


class Curriculum(Net):
    """Trains each epoch on more samples, in larger batches."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        return DataLoader(NoisyDataset(12 + 8 * epoch), batch_size=4 + epoch, shuffle=True)


def test_loader_of_another_epoch() -> None:
    """After a resume, too, requested loaders may differ from those of the previous epoch."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        trainer.fit(Curriculum(), val_dataloaders=DataLoader(NoisyDataset(8), batch_size=4))
        return trainer

    costs = assert_resumes_exactly(fit, [KillAt(2), KillAt(3)], options={"every_n_train_steps": 1})
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 2), (1, 2)]


class Again(Net):
    """Returns the same CombinedLoader each time."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
        self.combined = CombinedLoader([DataLoader(NoisyDataset(), batch_size=4, shuffle=True, **workers)])

    def train_dataloader(self) -> Any:
        return self.combined

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


@each_num_workers
def test_combined_loader_that_is_given_again(num_workers: int) -> None:
    """A CombinedLoader that is returned with the followed copies continues exactly, and gets its loaders back."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        module = Again(num_workers)
        loaders = list(module.combined.flattened)
        trainer = make_trainer(callbacks, directory, max_epochs=3, reload_dataloaders_every_n_epochs=1)
        trainer.fit(module, val_dataloaders=DataLoader(NoisyDataset(8), batch_size=4))
        assert [type(loader) for loader in module.combined.flattened] == [type(loader) for loader in loaders]
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(19)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, 2, 3)


class Derives(Net):
    """Creates its loaders from what trainer, module, and generators show when they are requested, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.level = 0
        self.own = random.Random(1)

    def derived(self) -> int:
        trainer = self.trainer
        loss = trainer.callback_metrics.get("loss_epoch", torch.zeros(()))
        rates = trainer.optimizers[0].param_groups[0]["lr"], trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
        with torch.no_grad():
            computed = float(self.layers(torch.ones(2, 4)).sum()), float(torch.rand(())), self.own.random()
        shown = trainer.current_epoch, trainer.global_step, float(loss), rates, self.level, computed
        return zlib.crc32(repr(shown).encode())

    def train_dataloader(self) -> Any:
        return DataLoader(Seeded(self.derived(), 20), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(Seeded(self.derived(), 8), batch_size=4)

    def on_train_batch_end(self, *args: Any) -> None:
        self.level += 1


class Seeded(NoisyDataset):
    """Holds a seed, and no other sign of what its samples are."""

    def __init__(self, seed: int, length: int) -> None:
        super().__init__(length)
        self.seed = seed

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(4, generator=torch.Generator().manual_seed(self.seed + index))


@pytest.mark.parametrize("every", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 2])
def test_loaders_derived_from_the_trainer(every: int) -> None:
    """A resume creates loaders from the trainer's values, the attributes, weights, and generators of then."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, max_epochs=4, reload_dataloaders_every_n_epochs=every)
        trainer.fit(Derives())
        return trainer

    costs = assert_resumes_exactly(fit, [KillAt(6), KillAt(9)], options={"every_n_train_steps": 1})
    assert [(cost.epoch, cost.batch) for cost in costs] == [(1, 1), (3, 0)]
