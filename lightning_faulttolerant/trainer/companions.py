"""Callbacks next to `FaultTolerance` that tell it to do more: to record incidents, and to watch for hangs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from lightning_faulttolerant.errors import OPTIONS_VARIABLE, UnsupportedTrainerError
from lightning_faulttolerant.records.incidents import MeasuredStep
from lightning_faulttolerant.trainer.bases import AnyCallback, served
from lightning_faulttolerant.trainer.settings import (
    Options,
    checked_recording,
    checked_watch,
    described,
    read_options,
    with_options_of_environment,
)


class Protection(AnyCallback):
    """The base of `FaultTolerance`: the companions look for it."""


class Companion(AnyCallback):
    """A callback that tells the `FaultTolerance` of its Trainer something, wherever it is in the list."""

    said: dict[str, object]
    """The fields of `Options` that it sets."""

    def __repr__(self) -> str:
        return described(self, type(self).__init__)

    def setup(self, trainer: object, pl_module: object, stage: str) -> None:
        """Refuse to be alone."""
        callbacks = served(trainer).compat.callbacks(trainer)
        if not any(isinstance(each, Protection) for each in callbacks):
            name = type(self).__name__
            raise UnsupportedTrainerError(
                f"{name} works only next to FaultTolerance: pass Trainer(callbacks=[FaultTolerance(), {name}()]), or "
                "set PL_FAULT_TOLERANT_TRAINING=1."
            )


class FlightRecorder(Companion):
    """Keeps the state before each step in which something goes wrong, and keeps autosaves for replays.

    It works next to `FaultTolerance`, in any order. Arguments that are not passed are taken from
    ``PL_FAULT_TOLERANT_OPTIONS``, as ``FlightRecorder.rule=spike``: that alone adds the callback, too.

    Args:
        rule: Which steps are incidents: ``nan``: the loss or a gradient is not finite; ``spike``: that, or a loss far
            above the recent ones; or a function of a `MeasuredStep` that returns a bool. The state before the step is
            saved, and never removed. Exceptions are incidents, too. It needs a capture before each batch and a wait
            for the device after each backward pass. ``None``: nothing is recorded.
        stop: Whether an incident ends the run, with an ``IncidentError``. If not, training continues.
        keep_every: Save at each multiple of this many optimizer steps, too, and never remove these autosaves, not even
            when the run has finished. ``lightning-faulttolerant replay`` starts from them.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range, or two contradict each other.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_faulttolerant import FaultTolerance, FlightRecorder
        >>> trainer = Trainer(callbacks=[FaultTolerance(), FlightRecorder()], logger=False)
    """

    @with_options_of_environment
    def __init__(
        self,
        rule: Literal["nan", "spike"] | Callable[[MeasuredStep], bool] | None = "nan",
        *,
        stop: bool = False,
        keep_every: int | None = None,
    ) -> None:
        self.said = checked_recording(rule, stop=stop, keep_every=keep_every)


class HangWatch(Companion):
    """Lets another process notice if a section of the run takes far too long.

    It works next to `FaultTolerance`, in any order. ``lightning-faulttolerant run`` watches even without it. Arguments
    that are not passed are taken from ``PL_FAULT_TOLERANT_OPTIONS``, as ``HangWatch.timeout=600``: that alone adds the
    callback, too.

    Args:
        action: ``stop``: the other process ends the ranks with exit code 60, and writes what each of them was doing
            next to the autosaves; ``report``: it only writes; ``off``.
        timeout: How many seconds a section of the run may take: its setup, a batch, a save, the end of an epoch, its
            teardown. Default: for batches, ten times the slowest of their kind so far, and at least 300; for all other
            sections, and until the first batch has ended, at least 30 minutes.

    Raises:
        TypeError: If `timeout` is not a number.
        ValueError: If an argument is out of its range.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_faulttolerant import FaultTolerance, HangWatch
        >>> trainer = Trainer(callbacks=[FaultTolerance(), HangWatch(timeout=600)], logger=False)
    """

    @with_options_of_environment
    def __init__(self, action: Literal["off", "report", "stop"] = "stop", *, timeout: float | None = None) -> None:
        self.said = checked_watch(action, timeout)


def with_companions(options: Options, callbacks: Sequence[object]) -> Options:
    """Return the options of `FaultTolerance`, with those of the companions in its Trainer or in the environment."""
    for kind in (FlightRecorder, HangWatch):
        passed = [callback for callback in callbacks if isinstance(callback, kind)]
        if passed or read_options(kind.__init__, os.environ.get(OPTIONS_VARIABLE, "")):
            options = replace(options, **(passed or [kind()])[0].said)  # type: ignore[arg-type]
    return options
