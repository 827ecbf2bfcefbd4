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
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
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
    """Raises after the first batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        raise ZeroDivisionError


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(num_workers: int, fails: bool, tmp_path: Path) -> None:
    """After a fit, even a failed one, loaders, data set, module, trainer, and signal handlers are as before."""
    loader = rows_of(24, num_workers=num_workers)()
    validation = CombinedLoader([rows_of(8, shuffle=False)()], "sequential")
    [inner] = validation.flattened
    children = set(multiprocessing.active_children())

    def state() -> Any:
        handlers = {signum: signal.getsignal(signum) for signum in signal.valid_signals()}
        return dict(vars(loader)), dict(vars(inner)), dict(vars(loader.dataset)), handlers

    before, module = state(), Net()
    own = [FaultTolerance(tmp_path, every_n_train_steps=1), *([Fails()] if fails else [])]
    trainer = Trainer(callbacks=own, default_root_dir=tmp_path, max_epochs=1, logger=False, **QUIET)
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
        trainer.fit(module, loader, validation)
    assert validation.flattened == [inner]
    assert state() == before
    for thing in (loader, validation, loader.dataset, module, trainer):
        assert ours(thing, set()) == []
    assert set(multiprocessing.active_children()) <= children
