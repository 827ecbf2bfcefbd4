"""A feature of a training script is a row; a group is a training with several rows that are compatible.

A module of a row is a class below `Net` that calls ``super()`` in each hook that other rows have, too: the classes of a
group are joined by inheritance. The loaders of a group are joined by Lightning, and all modules see the rows of their
batches as one tensor. What a row takes for itself alone (an argument of the Trainer, a hook without ``super()``, an
attribute) is found out, or named in `takes`; rows that take the same thing never meet.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.laws.data_sets import NoisyDataset

MOST_LOADERS = 5
PARTS_OF_EVENTS = ("content", "result", "weights", "optimizers", "random", "modes", "stopped", "batch", "evaluated")
FEATURES = Path(__file__).parent / "features"
_LAWS = __name__.rpartition(".")[0]  # not always tests.laws: see tests/twin
_NEEDED = {_LAWS, *(f"{_LAWS}.{name}" for name in ("cuts", "data_sets", "events", "features", "rows", "runs"))}
Made = TypeVar("Made", bound=Callable[..., Any])


class Net(LightningModule):
    """Dropout, batch norm, Adam, a scheduler per step; logs its loss per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return joined(batch).to(self.dtype)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss of a batch of rows of four numbers."""
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", self.loss(batch))

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("test_loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.layers(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def joined(batch: Any) -> Tensor:
    """Return all numbers of a batch as rows of four."""
    found = [each.detach().reshape(-1).float() for each in tensors_in(batch)]
    flat = torch.cat(found) if found else torch.zeros(4)
    return nn.functional.pad(flat, (0, -len(flat) % 4)).reshape(-1, 4)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors and numbers of a batch, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (int, float, np.number, np.ndarray)):
        yield torch.as_tensor(batch)
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from tensors_in(each)
    elif isinstance(batch, (list, tuple)):
        for each in batch:
            yield from tensors_in(each)
    elif hasattr(batch, "__dict__"):
        yield from tensors_in(vars(batch))


class Factor(Net):
    """Scales the loss by the result of `factor`, and logs that; subclasses keep state for it."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "factor" not in cls.__dict__:
            return
        factor, name = cls.factor, f"factor of {cls.__name__}"

        def training_step(self: Factor, batch: Any, batch_idx: int) -> Tensor:
            loss = super(cls, self).training_step(batch, batch_idx)
            value = factor(self, loss)
            self.log(name, float(value.detach() if isinstance(value, Tensor) else value))
            return loss * value / (1 + abs(value))  # bounded: in a training that diverges, nothing differs

        cls.training_step = training_step

    def factor(self, loss: Tensor) -> Any:
        """Return what the loss is scaled by."""
        return 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A feature.

    Args:
        name: Unique.
        part: The part of the state that carries it, as `leave_out_part` names it; empty if Lightning carries it.
        shows: The names of logged values, of parts of events, or kinds of events, that differ if it is lost.
        module: A class below `Net`.
        callbacks: Makes the callbacks that come before those of the test.
        train: Makes a loader; without one, a group trains on 6 shuffled noisy batches an epoch.
        alone: Whether `train` can't be joined with the loaders of other rows.
        validation: Makes the loaders of validation runs.
        data: Makes a data module.
        trainer: Arguments of the Trainer; ``logger`` is a function that makes one or several.
        options: Arguments of FaultTolerance.
        only_with: Whether only a run with the callback has the feature, so that there is no plain run to compare with.
        takes: What it takes for itself alone, besides what is found out.
        warns: Regular expressions of the warnings that it causes.
        imports: Modules that are imported once, before its processes are forked.
        apart: ``ahead`` if Lightning fetches its batches ahead, since it has no length; ``counts`` if it needs a
            length, or batches depend on what its loader counts, as long as the fault in `KNOWN` (test_resume.py) is
            open. The two never meet.
        ranks: Whether it works on several ranks.
        repeats: How many batches a kill may repeat at most, with a save at each step.
    """

    name: str
    part: str = ""
    shows: tuple[str, ...] = ()
    module: type[Net] | None = None
    callbacks: Callable[[], Callback | list[Callback]] | None = None
    train: Callable[[], Any] | None = None
    alone: bool = False
    validation: Callable[[], Any] | None = None
    data: Callable[[], LightningDataModule] | None = None
    trainer: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    only_with: bool = False
    takes: tuple[str, ...] = ()
    warns: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    apart: str = ""
    ranks: bool = True
    repeats: int = 1


_rows: dict[str, Row] = {}
_homes: dict[str, str] = {}
"""The module of each row."""


def add(name: str, **values: Any) -> Row:
    """Add a row."""
    for key in ("shows", "takes", "warns", "imports"):
        if isinstance(values.get(key), str):
            values[key] = (values[key],)
    if name in _rows:
        raise ValueError(f"There are two rows with the name {name!r}.")
    _rows[name] = Row(name=name, **values)
    return _rows[name]


def row(kind: str, **values: Any) -> Callable[[Made], Made]:
    """Return a decorator that adds a class or function as a row; `kind` is the argument of `Row` that it becomes."""

    def decorate(made: Made) -> Made:
        add(values.pop("name", made.__name__), **{kind: made}, **values)
        return made

    return decorate


def add_loader(name: str, train: Callable[[], Any], **values: Any) -> None:
    """Add a loader as a row whose batches our state of loaders carries."""
    add(name, **{"part": "loaders", "shows": "content", "train": train, **values})


def carried(made: type[Factor], *, takes: str = "") -> type[Factor]:
    """Add a module with a factor as a row that the object state carries."""
    add(made.__name__, module=made, part="objects", shows=f"factor of {made.__name__}", takes=takes and (takes,))
    return made


def all_rows() -> dict[str, Row]:
    """Return the rows of all features."""
    for found in sorted(pkgutil.iter_modules([str(FEATURES)]), key=lambda each: each.name):
        known, name = len(_rows), f"{_LAWS}.features.{found.name}"
        importlib.import_module(name)
        _homes.update(dict.fromkeys(list(_rows)[known:], name))
    return _rows


def forget_others(rows: Iterable[Row]) -> None:
    """Forget, in a process of their own, what other rows define: else each save would look through all of that."""
    rows = list(rows)
    kinds = [kind for each in rows for kind in (each.module or Net).__mro__]
    made = [*kinds, *(getattr(each, kind) for each in rows for kind in ("callbacks", "train", "validation", "data"))]
    kept = {_homes.get(each.name) for each in rows} | {getattr(each, "__module__", "") for each in made}
    tests = ("tests.", f"{_LAWS.partition('.')[0]}.")
    for name in [name for name in sys.modules if name.startswith(tests) and name not in kept | _NEEDED]:
        del sys.modules[name]
    for each in [_rows.pop(name) for name in _rows.keys() - {each.name for each in rows}]:
        for other in (each.module, each.callbacks, each.train, each.validation, each.data):
            home = vars(sys.modules.get(getattr(other, "__module__", ""), object))
            if isinstance(other, type) and other not in made and home.get(other.__name__) is other:
                del home[other.__name__]
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals["__name__"].startswith(tests):
            for name in [name for name in frame.f_globals if name.startswith("test_") or name == "GROUPS"]:
                del frame.f_globals[name]
        frame = frame.f_back


def taken(each: Row) -> frozenset[str]:
    """Return what a row takes for itself alone."""
    return _taken(each.name)


@functools.cache
def _taken(name: str) -> frozenset[str]:
    each = _rows[name]
    alone = {*each.takes, *(f"value {shown}" for shown in each.shows if shown not in PARTS_OF_EVENTS)}
    alone |= {kind for kind in ("validation", "data") if getattr(each, kind)}
    if each.data:
        alone |= {"validation"}
    alone |= {f"argument {argument}" for argument in each.trainer} | {f"option {option}" for option in each.options}
    if each.module:
        plain = vars(Net()).keys() | vars(Net())["_modules"].keys()
        made = each.module()
        own = {*vars(made), *made._modules, *made._parameters, *made._buffers} - plain
        alone |= {f"attribute {attribute}" for attribute in own}
        alone |= {f"method {method}" for method in _without_super(each.module)}
    if each.callbacks:
        made = each.callbacks()
        alone |= {f"callback {type(one).__name__}" for one in (made if isinstance(made, list) else [made])}
    return frozenset(alone)


def _without_super(module: type[Net]) -> set[str]:
    """Return the methods that hide those of other rows."""
    found: set[str] = set()
    for kind in module.__mro__[: module.__mro__.index(Net)]:
        for name, method in vars(kind).items():
            if inspect.isfunction(method) and "super" not in method.__code__.co_names and name != "factor":
                found.add(name)
    return found


def fits(each: Row, others: Iterable[Row]) -> bool:
    """Return whether a row can be in one training with others."""
    others = list(others)
    loaders = [row for row in [each, *others] if row.train or row.data]
    if len(loaders) > (1 if any(row.alone or row.data for row in loaders) else MOST_LOADERS):
        return False
    if {"ahead", "counts"} <= {row.apart for row in [each, *others]}:
        return False
    if each.only_with != any(other.only_with for other in others) and others:
        return False
    return all(taken(each).isdisjoint(taken(other)) for other in others)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A training with the features of some rows."""

    rows: tuple[Row, ...]

    def __str__(self) -> str:
        return "+".join(each.name for each in self.rows)

    def _one(self, kind: str) -> Callable[[], Any] | None:
        return next((made for each in self.rows if (made := getattr(each, kind)) is not None), None)

    def _merged(self, kind: str) -> dict[str, Any]:
        return {name: value for each in self.rows for name, value in getattr(each, kind).items()}

    @property
    def options(self) -> dict[str, Any]:
        return self._merged("options")

    @property
    def only_with(self) -> bool:
        """Whether there is no plain run to compare with."""
        return any(each.only_with for each in self.rows)

    @property
    def repeats(self) -> int:
        return max((each.repeats for each in self.rows), default=1)

    def trainer(self) -> dict[str, Any]:
        defaults = {"max_epochs": 2, "log_every_n_steps": 1, "enable_checkpointing": False}
        return {**defaults, **self._merged("trainer")}

    def module(self) -> Net:
        """Return a module with the features of all rows."""
        kinds = tuple(each.module for each in self.rows if each.module) or (Net,)
        if len(kinds) > 1:  # it has a name in this module, so that it can be pickled
            kinds = (type("Joined", kinds, {"__module__": __name__}),)
            globals()["Joined"] = kinds[0]
        return kinds[0]()

    def callbacks(self) -> list[Callback]:
        made = [each.callbacks() for each in self.rows if each.callbacks]
        return [one for each in made for one in (each if isinstance(each, list) else [each])]

    def data(self) -> dict[str, Any]:
        """Return the arguments of ``fit`` that give it data."""
        whole = self._one("data")
        if whole is not None:
            return {"datamodule": whole()}
        loaders = {each.name: each.train() for each in self.rows if each.train}
        validation = self._one("validation") or rows_of(8, shuffle=False)
        train = loaders if len(loaders) > 1 else next(iter(loaders.values())) if loaders else rows_of(24)()
        return {"train_dataloaders": train, "val_dataloaders": validation()}


def rows_of(length: int, *, shuffle: bool = True, **arguments: Any) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader of noisy rows, in batches of four."""
    return lambda: DataLoader(NoisyDataset(length), batch_size=4, shuffle=shuffle, **arguments)


class Rows(LightningDataModule):
    """Trains on so many noisy rows."""

    def __init__(self, num_rows: int = 24) -> None:
        super().__init__()
        self.num_rows = num_rows

    def train_dataloader(self) -> Any:
        return rows_of(self.num_rows)()

    def val_dataloader(self) -> Any:
        return rows_of(8, shuffle=False)()
