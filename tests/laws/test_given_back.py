"""What the callback leaves behind: nothing on loaders, no replaced loader, and no worker."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import weakref
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_faulttolerant import FaultTolerance
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import QUIET, Training


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


def test_nothing_is_left_on_a_loader(tmp_path: Path) -> None:
    """After fit a loader has its own class and no attributes of ours."""
    loader = rows_of(24)()
    names = set(vars(loader))
    fit(tmp_path, Net(), train_dataloaders=loader)
    assert type(loader) is DataLoader
    assert set(vars(loader)) == names


class FailsAtItsEnd(Net):
    """Ends its fit with an error."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            raise ZeroDivisionError


class FailsToCleanUp(Callback):
    """Fails in the hook in which other callbacks clean up."""

    def on_exception(self, *_: Any) -> None:
        raise RuntimeError("while cleaning up")


def test_autosaves_of_an_unfinished_fit_stay(tmp_path: Path) -> None:
    """A script that catches an error keeps the autosaves when it ends, even if another callback hides the error."""

    def script(trainer: Trainer, module: LightningModule, group: Group) -> None:
        with pytest.raises(RuntimeError):
            trainer.fit(module, **group.data())

    group = Group(rows=(Row(name="fails", module=FailsAtItsEnd, callbacks=FailsToCleanUp),))
    training = Training(group=group, root=tmp_path, stage=script)
    training.finished()
    assert list(tmp_path.rglob("autosave-*.ckpt"))


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("module", [Net, FailsAtItsEnd])
def test_workers_end_with_the_fit(module: type[Net], is_persistent: bool, tmp_path: Path) -> None:
    """Workers and the objects that iterate over them end with the fit, even while the loader exists."""
    loader = rows_of(8, num_workers=1, persistent_workers=is_persistent)()
    with pytest.raises(ZeroDivisionError) if module is FailsAtItsEnd else contextlib.nullcontext():
        fit(tmp_path, module(), train_dataloaders=loader)
    assert multiprocessing.active_children() == []
    gc.collect()
    assert [one for one in gc.get_objects() if isinstance(one, _MultiProcessingDataLoaderIter)] == []
