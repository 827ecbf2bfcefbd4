"""Private names of Lightning and Optuna: the loaders that were passed to ``fit``, and the storage of a study."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from lightning_faulttolerant.trainer.position import FIT, function_of, loop_of

SEAMS = {
    "trainer.fit_loop._data_source.instance": "fits of one script are told apart by the data that is passed to `fit`",
    "trainer.fit_loop.epoch_loop.val_loop._data_source.instance": "parts of a split are known by their loaders",
}
STUDY_SEAMS = {"study._storage": "trials of a study in memory are distinguished from those of one in a database"}


def given_loaders(trainer: Trainer) -> dict[str, object]:
    """Return the loaders that were passed to ``fit`` for training, or to an evaluation, by place.

    There are none if a module creates them later.
    """
    function = function_of(trainer)
    loop: Any = trainer.fit_loop if function == FIT else loop_of(trainer)
    return _given(loop, "train" if function == FIT else function)


def loaders_by_place(trainer: Trainer) -> dict[str, object]:
    """Return the loaders that were passed to the function that runs, by the places that they will have."""
    function = function_of(trainer)
    loops: dict[str, Any] = {function: loop_of(trainer)}
    if function == FIT:
        loops = {"train": trainer.fit_loop, "validation": trainer.fit_loop.epoch_loop.val_loop}
    given = {stage: list(_given(loop, stage).values()) for stage, loop in loops.items()}
    return {f"{stage}/{number}": one for stage, found in given.items() for number, one in enumerate(found)}


def _given(loop: Any, place: str) -> dict[str, object]:
    given = loop._data_source.instance
    return {} if isinstance(given, (LightningModule, LightningDataModule)) else dict(_loaders(given, place))


def _loaders(value: object, place: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, CombinedLoader):
        value = value.iterables
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _loaders(child, f"{place}.{name}")
    elif isinstance(value, (list, tuple)):
        for number, child in enumerate(value):
            yield from _loaders(child, f"{place}.{number}")
    elif value is not None:
        yield place, value


def storage_of(study: object) -> object:
    """Return the storage of an Optuna study; nothing public tells whether it is in memory only."""
    return getattr(study, "_storage", None)
