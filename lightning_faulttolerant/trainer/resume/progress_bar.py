"""Progress bars after a resume: they show the place of the run, and that it resumed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

from lightning_faulttolerant.trainer.evaluation.compat import forget_loader_of_bar
from lightning_faulttolerant.trainer.functions import stage_of
from lightning_faulttolerant.trainer.position import VALIDATION_END, TrainerPosition


@contextlib.contextmanager
def above_the_bar() -> Iterator[None]:
    """Print the lines that are written inside this context above a tqdm bar rather than into it."""
    with Tqdm.external_write_mode(nolock=False):
        yield


def go_on_at(trainer: Trainer, position: TrainerPosition) -> None:
    """Start the trainer's bar in the middle of an epoch, at `position`.

    Lightning sets up a bar in ``on_train_epoch_start``, which is not called for an epoch that has already begun.
    """
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    batch = position.batch
    told = f"resumed at {batch}"
    if isinstance(bar, TQDMProgressBar):
        # Call the method of this class: a user's subclass already ran its own when the epoch began.
        TQDMProgressBar.on_train_epoch_start(bar, trainer, module)
        tqdm = bar.train_progress_bar
        tqdm.n = tqdm.initial = batch
        if position.where == VALIDATION_END:  # this process did not begin that run, but will close its bar
            bar.val_progress_bar = Tqdm(disable=True)
        tqdm.set_description(f"{tqdm.desc.removesuffix(': ')} ({told})")
    elif isinstance(bar, RichProgressBar):
        RichProgressBar.on_train_epoch_start(bar, trainer, module)
        if bar.progress is None or bar.train_progress_bar_id is None:
            return
        task = bar.train_progress_bar
        # Not `update`: it would count the earlier batches as this process's, and the speed would be wrong.
        bar.progress.reset(
            bar.train_progress_bar_id,
            total=task.total,
            completed=batch,
            description=f"{task.description.rstrip()} ({told})",
        )
        bar.refresh()


def begin_next(trainer: Trainer) -> None:
    """Start the bar of the epoch after the resumed one at 0. Otherwise tqdm would show a negative first rate."""
    bar = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        bar.train_progress_bar.initial = 0


def begin_evaluation(trainer: Trainer) -> None:
    """Start the bar of an evaluation that continues. Its hook at the start of the run is not called again."""
    bar, module = trainer.progress_bar_callback, trainer.lightning_module
    kind = next((kind for kind in (TQDMProgressBar, RichProgressBar) if isinstance(bar, kind)), None)
    if kind is not None:
        getattr(kind, f"on_{stage_of(trainer)}_start")(bar, trainer, module)
        forget_loader_of_bar(bar)
