"""Private names of Lightning for single steps, checked on 2.5.6 to 2.6.6: in a ledger, a replay, or left out.

The tables list them for the contract test, with what breaks without each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher

SEAMS = {
    "trainer._logger_connector.on_batch_start": "the contents of batches, and the generators before their steps",
    "trainer._logger_connector.on_batch_end": "faults that a drill makes at the end of a batch",
    "trainer._logger_connector.log_metrics": "values given to the loggers",
    "trainer._logger_connector.log_eval_end_metrics": "the results of validation runs",
    "trainer._logger_connector._first_loop_iter": "telling values of an epoch from those of a batch",
    "trainer.fit_loop.epoch_loop._batches_that_stepped": "the step of values given to the loggers",
    "trainer.fit_loop._data_fetcher": "the contents of batches that a step fetches by itself",
    "trainer.test_loop._data_fetcher": "the contents of batches that a step of an evaluation fetches by itself",
    "trainer.fit_loop.epoch_loop._should_accumulate": "the optimizer step of a window with a batch left out",
    "trainer.fit_loop.epoch_loop._num_ready_batches_reached": "schedulers, if the last batch of an epoch is left out",
    "trainer.fit_loop.epoch_loop._should_check_val_fx": "a validation run that is still owed before such a batch",
}
LOGGER_SEAMS = {"_experiment": "a replay does not add to files that a logger began before the fit"}
MODEL_CHECKPOINT_SEAMS = {"_link_checkpoint": "a replay does not replace the link of save_last='link'"}

LINK_CHECKPOINT = "_link_checkpoint"
SHOULD_ACCUMULATE = "_should_accumulate"


def logger_connector(trainer: Trainer) -> object:
    """Return the object that is called for each training and validation batch, and passes values to the loggers."""
    return trainer._logger_connector


def is_after_the_batches(trainer: Trainer) -> bool:
    """Return whether values logged now are of a whole epoch or validation run, rather than of a batch."""
    return trainer._logger_connector._first_loop_iter is None


def fetching_by_itself(loop: Any) -> bool:
    """Return whether the steps of a loop take the ``dataloader_iter`` and fetch by themselves."""
    return isinstance(loop._data_fetcher, _DataLoaderIterDataFetcher)


@contextlib.contextmanager
def fetches_seen(loop: Any, seen: Callable[[object], None]) -> Iterator[None]:
    """Within the block, pass `seen` each batch that a step with a ``dataloader_iter`` fetches itself."""
    fetcher = loop._data_fetcher
    if not isinstance(fetcher, _DataLoaderIterDataFetcher) or fetcher.iterator is None:
        yield
        return
    fetched = fetcher.iterator
    fetcher.iterator = _Seen(fetched, seen)
    try:
        yield
    finally:
        fetcher.iterator = fetched


class _Seen(Iterator[Any]):
    def __init__(self, fetched: Iterator[Any], seen: Callable[[object], None]) -> None:
        self._fetched = fetched
        self._seen = seen

    def __next__(self) -> object:
        item = next(self._fetched)
        self._seen(item[0])  # the batch, its number, and that of its loader
        return item


def as_logged(trainer: Trainer, metrics: Mapping[str, Any], step: int | None) -> tuple[int | None, dict[str, object]]:
    """Return the step and the values that loggers get for `metrics`; they get them only if there are loggers."""
    values = dict(metrics)
    if step is None:
        own = values.pop("step", None)
        if own is not None:
            return int(own), values
        values.setdefault("epoch", trainer.current_epoch)
        step = trainer.fit_loop.epoch_loop._batches_that_stepped
    return step, values


def begin_again(logger: Any) -> None:
    """Let a logger of files begin new ones."""
    logger._experiment = None


def next_batch(trainer: Trainer) -> tuple[int, int]:
    """Return epoch and batch of the training batch that is fetched next, both from 0."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.completed


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
