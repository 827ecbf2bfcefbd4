"""Optimizers and schedulers that training has put in place of the original ones. No new process creates them again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging

from lightning_faulttolerant.trainer import compat

REPLACED = "replaced"

Kinds = dict[str, list[str]]
"""The classes of the optimizers and of the schedulers."""


@final
class Replaced:
    """The classes of a fit's optimizers and schedulers, compared with the classes at its start.

    Args:
        trainer: The trainer that runs the fit. Its optimizers are as they were created.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._first = self._now()

    def state_dict(self) -> Kinds | None:
        """Return the classes, or ``None`` while they are the original ones."""
        now = self._now()
        return None if now == self._first else now

    def why_not_exact(self, state: Kinds | None) -> list[str]:
        """Return why the states that `state` describes can't be loaded into the current objects, one line for each."""
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
        # StochasticWeightAveraging swaps a scheduler, and other code makes sure that it does so again.
        swaps = any(isinstance(callback, StochasticWeightAveraging) for callback in compat.callbacks(self._trainer))
        schedulers = [] if swaps else [config.scheduler for config in self._trainer.lr_scheduler_configs]
        return {"optimizer": _kinds(self._trainer.optimizers), "scheduler": _kinds(schedulers)}


def _kinds(objects: Sequence[object]) -> list[str]:
    return [type(one).__qualname__ for one in objects]
