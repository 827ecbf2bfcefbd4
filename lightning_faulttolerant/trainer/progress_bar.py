"""Progress bars after a resume: they stand where the run stands, and say that it resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_faulttolerant.trainer.position import VALIDATION_END, Position


@contextlib.contextmanager
def above_the_bar() -> Iterator[None]:
    """Let lines that are written meanwhile stand above a bar of tqdm's rather than in it."""
    with Tqdm.external_write_mode(nolock=False):
        yield


def go_on_at(trainer: Trainer, position: Position) -> None:
    """Let the trainer's bar begin in the middle of an epoch, at `position`.

    Lightning sets a bar up in ``on_train_epoch_start``, which is not called for an epoch that has begun already.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    batch = position.batch
    told = f"resumed at {batch}"
    if isinstance(bar, TQDMProgressBar):
        # The class's own, since what a user's class does there it did when the epoch began.
        TQDMProgressBar.on_train_epoch_start(bar, trainer, module)
        tqdm = bar.train_progress_bar
        tqdm.n = tqdm.initial = batch
        if position.where == VALIDATION_END:  # of a run that has not begun in this process, and yet will be closed
            bar.val_progress_bar = Tqdm(disable=True)
        tqdm.set_description(f"{tqdm.desc.removesuffix(': ')} ({told})")
    elif isinstance(bar, RichProgressBar):
        RichProgressBar.on_train_epoch_start(bar, trainer, module)
        if bar.progress is None or bar.train_progress_bar_id is None:
            return
        task = bar.train_progress_bar
        # Not update: it would take the batches from before for this process's, and the speed would be wrong.
        bar.progress.reset(
            bar.train_progress_bar_id,
            total=task.total,
            completed=batch,
            description=f"{task.description.rstrip()} ({told})",
        )
        bar.refresh()


def begin_next(trainer: Trainer) -> None:
    """Let the bar of the epoch after the resumed one begin at 0: tqdm would show its first rate as a negative one."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = 0
