"""Records everything that a fit does, event by event, so that two fits can be compared bit by bit.

Each event is written to the file immediately, so the events of a killed process are not lost.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lightning_faulttolerant.trainer.bases import AnyCallback, served
from lightning_faulttolerant.trainer.callback import FaultTolerance


class Recorder(AnyCallback):
    """Records batches, losses, learning rates, logged values and validation results of a fit.

    Args:
        path: The file, with one JSON object per line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._told_resume = False

    def write(self, event: str, **values: object) -> None:
        """Add one event."""
        with open(self._path, "ab", buffering=0) as file:
            file.write(json.dumps({"event": event, **values}, sort_keys=True).encode() + b"\n")

    def setup(self, trainer: object, pl_module: object, stage: str) -> None:
        """Listen to the loggers."""
        if stage == "fit":
            served(trainer).listen(trainer, self)
            for callback in served(trainer).compat.callbacks(trainer):
                if isinstance(callback, FaultTolerance):
                    callback.call_on_skipped(partial(self._left_out, trainer))

    def _left_out(self, trainer: object, epoch: int, batch: int) -> None:
        """Record that a batch is left out."""
        self._tell_resume(trainer)
        self.write("left out", epoch=epoch, batch=batch)

    def on_train_batch_start(self, trainer: object, pl_module: object, batch: object, batch_idx: int) -> None:
        """Record the contents of a batch, and the metrics that the trainer shows before it."""
        self._tell_resume(trainer)
        self.write("batch", **served(trainer).batch_event(trainer, batch, batch_idx))

    def on_train_batch_end(
        self, trainer: object, pl_module: object, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Record the loss and the learning rates."""
        self.write("step", **served(trainer).step_event(trainer, outputs, batch, batch_idx))

    def on_validation_start(self, trainer: Any, pl_module: object) -> None:
        """Record that a validation run begins."""
        if not trainer.sanity_checking:
            self._tell_resume(trainer)
            batch = trainer.fit_loop.epoch_loop.batch_progress.current.completed
            self.write("validation", epoch=trainer.current_epoch, batch=batch)

    def on_validation_batch_start(
        self, trainer: Any, pl_module: object, batch: object, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Record the contents of a validation batch."""
        if not trainer.sanity_checking:
            self._tell_resume(trainer)
            content = served(trainer).digest(batch)
            self.write("validation batch", batch=batch_idx, loader=dataloader_idx, content=content)

    def on_validation_end(self, trainer: Any, pl_module: object) -> None:
        """Record the results of a validation run."""
        if not trainer.sanity_checking:
            metrics = served(trainer).shown_metrics(trainer)
            self.write("validated", epoch=trainer.current_epoch, metrics=metrics)

    def _tell_resume(self, trainer: object) -> None:
        if self._told_resume:
            return
        self._told_resume = True
        for callback in served(trainer).compat.callbacks(trainer):
            report = callback.resume_report if isinstance(callback, FaultTolerance) else None
            if report is not None:
                place = {"epoch": report.epoch, "batch": report.batch, "num_validated": report.num_validated}
                self.write("resumed", exact=report.is_exact, where=report.where, text=report.position, **place)


class KillAt(AnyCallback):
    """Sends a signal to this process when it trains its `batch`-th batch (counted in this process, from 0).

    Args:
        batch: The batch at which to send the signal.
        signum: The signal.
        to_group: Whether the whole process group gets it, as with Ctrl-C in a terminal.
        hook: Where in the batch: ``start``, ``end`` or ``validation`` (the first validation batch after it).
        rank: The rank that strikes. Default: all ranks.
    """

    def __init__(
        self,
        batch: int,
        *,
        signum: int = signal.SIGKILL,
        to_group: bool = False,
        hook: str = "start",
        rank: int | None = None,
    ) -> None:
        self._batch = batch
        self._signum = signum
        self._to_group = to_group
        self._hook = hook
        self._rank = rank
        self._seen = -1

    def on_train_batch_start(self, trainer: object, *_: object) -> None:
        """Count, and strike if it is time."""
        self._seen += 1
        self._strike("start", trainer)

    def on_train_batch_end(self, trainer: object, *_: object) -> None:
        """Strike if it is time."""
        self._strike("end", trainer)

    def on_validation_batch_start(self, trainer: Any, *_: object) -> None:
        """Strike if it is time."""
        if not trainer.sanity_checking:
            self._strike("validation", trainer)

    def _strike(self, hook: str, trainer: Any) -> None:
        is_here = self._rank is None or self._rank == trainer.global_rank
        if is_here and self._seen == self._batch and self._hook == hook:
            self._batch = -2
            if self._to_group:
                os.killpg(os.getpgid(0), self._signum)
            else:
                os.kill(os.getpid(), self._signum)


def record_end(recorder: Recorder, trainer: object, draws: Mapping[str, object]) -> None:
    """Record the final state of a fit: weights, optimizers, metrics, callbacks, and the generators' next draws."""
    recorder.write("end", draws=dict(draws), **served(trainer).end_event(trainer))
