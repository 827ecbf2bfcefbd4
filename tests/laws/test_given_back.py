"""What the callback leaves behind: nothing on loaders, no replaced loader, and no worker."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from tests.laws.data_sets import NoisyDataset
from tests.laws.features.any_iterables import Batches, LivesOn, ShiftedSlice
from tests.laws.rows import Net, rows_of
from tests.laws.runs import QUIET


def fit(root: Path, module: Net, **arguments: Any) -> None:
    """Fit with the callback."""
    protected = FaultTolerance(root / "autosaves", run_id="a")
    data = {name: arguments.pop(name) for name in ("train_dataloaders",) if name in arguments}
    settings = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, **QUIET, **arguments}
    trainer = Trainer(callbacks=[protected], default_root_dir=root, **settings)
    trainer.fit(module, val_dataloaders=rows_of(8, shuffle=False)(), **data)


class Replaces(Net):
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


def test_replaced_loaders_are_freed(tmp_path: Path) -> None:
    """Neither the data set nor the workers of a replaced loader are kept."""
    module = Replaces()
    fit(tmp_path, module, max_epochs=4, reload_dataloaders_every_n_epochs=1)
    assert module.num_there == [(1, 1)] * 4


@pytest.mark.parametrize("make", [Batches, ShiftedSlice, LivesOn])
def test_nothing_is_left_on_a_loader(make: Callable[[], Any], tmp_path: Path) -> None:
    """After fit a loader has its own class and no attributes of ours."""
    loader = make()
    names = set(vars(loader))
    fit(tmp_path, Net(), train_dataloaders=loader)
    assert type(loader) is make
    assert set(vars(loader)) - {"iterator"} == names - {"iterator"}
