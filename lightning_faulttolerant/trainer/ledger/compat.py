"""Private names of Lightning that a ledger reads, checked on 2.5.6 to 2.6.6.

`SEAMS` lists them for the contract test, with what breaks without each.
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
}


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
