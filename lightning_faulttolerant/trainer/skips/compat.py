"""Private names of Lightning's loops for a batch that is left out, checked on 2.5.6 to 2.6.6. See `trainer.compat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer

SEAMS = {
    "trainer.fit_loop.epoch_loop._should_accumulate": "the optimizer step of a window with a batch left out",
    "trainer.fit_loop.epoch_loop._num_ready_batches_reached": "schedulers, if the last batch of an epoch is left out",
    "trainer.fit_loop.epoch_loop._should_check_val_fx": "a validation run that is still owed before such a batch",
}

SHOULD_ACCUMULATE = "_should_accumulate"


def next_batch(trainer: Trainer) -> tuple[int, int]:
    """Return epoch and batch of the training batch that is fetched next, both from 0."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.completed


def num_ready(trainer: Trainer) -> int:
    """Return how many batches of the epoch have begun."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def owes_validation(trainer: Trainer, fetcher: Any) -> bool:
    """Return whether Lightning may first end a validation run that a checkpoint was saved in."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return bool(epoch_loop.restarting and epoch_loop._should_check_val_fx(fetcher))


def pass_over(trainer: Trainer, fetcher: Any, fetch: Callable[[object], str]) -> str:
    """Fetch the next batch, and count it as done, without hooks, a step, or anything logged.

    Args:
        trainer: The trainer that runs the fit.
        fetcher: The fetcher of the epoch.
        fetch: Fetches the batch from it, and returns why it could not be loaded.

    Returns:
        What `fetch` has returned.

    Raises:
        StopIteration: If there is none.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop.val_loop.restarting = False  # as Lightning does at the beginning of each batch
    why = fetch(fetcher)
    progress = epoch_loop.batch_progress
    progress.is_last_batch = fetcher.done
    progress.increment_ready()
    progress.increment_started()
    progress.increment_processed()
    progress.increment_completed()
    if epoch_loop._num_ready_batches_reached():
        epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    return why


def count_failed_fetch(fetcher: Any) -> None:
    """Count a batch that the loader has moved past, but could not return."""
    fetcher.combined_loader._iterator._idx += 1
    fetcher.fetched += 1
    if fetcher.length is not None:
        fetcher.done = fetcher.fetched >= fetcher.length
