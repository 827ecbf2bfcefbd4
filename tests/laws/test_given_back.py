"""What the callback leaves behind: nothing on any object, no handler, no replaced loader, and no worker."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import signal
import weakref
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_faulttolerant import FaultTolerance
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Net, rows_of
from tests.laws.runs import QUIET


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


def trainer(root: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    """Return a trainer with the callback."""
    settings = {"max_epochs": 2, "enable_checkpointing": False, "logger": False, **QUIET, **arguments}
    own = FaultTolerance(root / "autosaves", run_id="a", every_n_train_steps=1)
    return Trainer(callbacks=[own, *callbacks], default_root_dir=root, **settings)


def test_replaced_loaders_are_freed(tmp_path: Path) -> None:
    """Neither the data set nor the workers of a replaced loader are kept."""
    module = Replaces()
    trainer(tmp_path, reload_dataloaders_every_n_epochs=1).fit(module, val_dataloaders=rows_of(8, shuffle=False)())
    assert module.num_there == [(1, 1)] * 2


def ours(value: Any, seen: set[int], depth: int = 0) -> list[str]:
    """Return the types of this package that are reachable from an object's attributes; the callback is the user's."""
    if id(value) in seen or depth > 6 or isinstance(value, FaultTolerance):
        return []
    seen.add(id(value))
    found = [kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("lightning_faulttolerant")]
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        children = list(value)
    else:
        children = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
    return found + [name for child in children for name in ours(child, seen, depth + 1)]


class Fails(Callback):
    """Raises in the second epoch, or in the second batch of an evaluation."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            raise ZeroDivisionError

    def on_test_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            raise ZeroDivisionError


@pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("workers", [{}, {"num_workers": 2}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_nothing_is_left_behind(workers: dict[str, Any], fails: bool, tmp_path: Path) -> None:
    """After a fit and a test, even failed ones, all objects and signal handlers are as before, and workers end."""
    loader = rows_of(24, **workers)()
    validation = CombinedLoader([rows_of(8, shuffle=False)()], "sequential")
    [inner] = validation.flattened
    loggers = [CSVLogger(tmp_path / "a"), TensorBoardLogger(tmp_path / "b")]

    def state() -> Any:
        handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        kinds = [type(each) for each in (loader, inner, loader.dataset)]
        return kinds, dict(vars(loader)), dict(vars(inner)), dict(vars(loader.dataset)), handlers

    before, module = state(), Net()
    one = trainer(tmp_path, *([Fails()] if fails else []), logger=loggers)
    for function, data in ((one.fit, (loader, validation)), (one.test, (validation,))):
        with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
            function(module, *data)
        assert validation.flattened == [inner]
        assert state() == before
        for thing in (loader, validation, loader.dataset, module, one, *loggers):
            assert ours(thing, set()) == []
        assert multiprocessing.active_children() == []
        gc.collect()
        assert [each for each in gc.get_objects() if isinstance(each, _MultiProcessingDataLoaderIter)] == []
    assert vars(loggers[0].experiment).keys() == vars(CSVLogger(tmp_path / "a").experiment).keys()
