"""Optimizers and schedulers that training has put in the place of others: no other process makes them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_faulttolerant.trainer import compat

REPLACED = "replaced"

Kinds = dict[str, list[str]]
"""The classes of the optimizers, and of the schedulers."""


@final
class Replaced:
    """The classes of a fit's optimizers and schedulers, compared with those that it made at its start.

    Args:
        trainer: Whose fit it is; its optimizers are as they were made.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = self._now()

    def state_dict(self) -> Kinds | None:
        """Return the classes, or ``None`` while all are those that were made."""
        now = self._now()
        return None if now == self._first else now

    def why_not_exact(self, state: Kinds | None) -> list[str]:
        """Return why what `state` tells of can't be loaded into what was made, a line for each."""
        if state is None:
            return []
        pairs = (
            (f"{kind} {number}", saved, made)
            for kind in self._first
            for number, (saved, made) in enumerate(zip_longest(state[kind], self._first[kind], fillvalue="nothing"))
        )
        return [
            f"while training, {name} became {saved}, and configure_optimizers makes {made}, which can't continue from"
            " its state" for name, saved, made in pairs if saved != made
        ]  # fmt: skip

    def _now(self) -> Kinds:
        # StochasticWeightAveraging swaps a scheduler, and is seen to it that it does so again.
        swaps = any(isinstance(callback, StochasticWeightAveraging) for callback in compat.callbacks(self._trainer))
        schedulers = [] if swaps else [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return {"optimizer": _kinds(self._trainer.optimizers), "scheduler": _kinds(schedulers)}


def _kinds(objects: Sequence[object]) -> list[str]:
    return [type(one).__qualname__ for one in objects]
