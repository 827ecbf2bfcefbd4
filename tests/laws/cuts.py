"""Where and how a start of a training ends: `Cut` is data, `Cuts` is the plain callback that does it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LambdaCallback


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """The end of a start.

    Args:
        at: Epoch and batch, counted from 0.
        hook: ``batch`` (before its step), ``step`` (after it), ``backward``, ``validation`` (in a batch of any
            evaluation), ``validation end``, or ``epoch end``.
        inside: The loader and the batch of an evaluation.
        stage: The function of the Trainer, such as ``test``; any if it is empty.
        by: A signal, or an exception if it is 0.
        every: The start saves after this many steps.
        rank: The rank that ends; all of them if it is ``None``.
    """

    at: tuple[int, int]
    hook: str = "batch"
    by: int = signal.SIGKILL
    every: int = 1
    rank: int | None = None
    inside: tuple[int, int] = (0, 1)
    stage: str = ""

    def __str__(self) -> str:
        how = signal.Signals(self.by).name if self.by else "an exception"
        inside = f" {self.inside} of {self.stage or 'any function'}" if "validation" in self.hook else ""
        return f"{how} at {self.hook}{inside} {self.at}, saving every {self.every}"

    @property
    def exit_code(self) -> int:
        """The exit code that the start must have."""
        if not self.by:
            return 1
        return -self.by if self.by == signal.SIGKILL else 128 + self.by


class Struck(Exception):  # noqa: N818 - reads as a plain statement
    """The exception of a cut."""


def end(by: int) -> None:
    """End this process by a signal, or raise if it is 0."""
    if not by:
        raise Struck
    os.kill(os.getpid(), by)


def ends_in(hook: str, by: int = signal.SIGKILL) -> Callback:
    """Return a callback that ends the process at the first call of a hook."""
    return LambdaCallback(**{hook: lambda *_: end(by)})


class Cuts(Callback):
    """Ends the process at a cut; never, without one."""

    def __init__(self, cut: Cut | None) -> None:
        self.cut = cut

    def strike(self, trainer: Trainer, hook: str, batch: int | None = None) -> None:
        cut = self.cut
        if cut is None or cut.hook != hook or trainer.sanity_checking or cut.rank not in (None, trainer.global_rank):
            return
        if cut.stage not in ("", trainer.state.fn):
            return
        if trainer.state.fn == "fit" and trainer.current_epoch != cut.at[0]:
            return
        if batch is not None and batch != cut.at[1]:
            return
        end(cut.by)

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.strike(trainer, "batch", batch_idx)

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        self.strike(trainer, "backward", trainer.fit_loop.batch_idx)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.strike(trainer, "step", batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.cut is not None and self.cut.inside == (dataloader_idx, batch_idx):
            self.strike(trainer, "validation")

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self.strike(trainer, "validation end")

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start
    on_test_end = on_predict_end = on_validation_end

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        self.strike(trainer, "epoch end")


class At(Callback):
    """Does something before some batches; it has no state."""

    def __init__(self, actions: dict[tuple[int, int], Callable[[], object]]) -> None:
        self.actions = actions

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.actions.get((trainer.current_epoch, batch_idx), lambda: None)()


def on_sync(strike: Callable[[bool], object]) -> Callable[[], None]:
    """Return what lets `strike` come before each ``fsync`` of a process; it gets whether a thread writes."""

    def before() -> None:
        sync = os.fsync

        def fsync(descriptor: int) -> None:
            strike(threading.current_thread() is not threading.main_thread())
            sync(descriptor)

        os.fsync = fsync

    return before
