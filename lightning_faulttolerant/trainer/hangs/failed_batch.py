"""The batch in which an exception was raised, and its samples, for the process that supervises the run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.loader.iteration import Iteration
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.supervision.failures import TrainingFailure
from lightning_faulttolerant.trainer.compat import num_completed, step_fetches
from lightning_faulttolerant.trainer.functions import FIT, function_of, loop_of
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION, Loaders


def failure_of(trainer: Trainer, loaders: Loaders, exception: BaseException, *, has_begun: bool) -> TrainingFailure:
    """Return what the supervisor needs to know of an exception that ends a fit or an evaluation.

    Args:
        trainer: The trainer that runs it.
        loaders: Its loaders.
        exception: The exception.
        has_begun: Whether the first batch has begun.
    """
    function = function_of(trainer)
    is_evaluating = has_begun and (function != FIT or trainer.validating)
    batch = num_completed(trainer) if function == FIT else 0
    stage = TRAIN if not is_evaluating else VALIDATION if function == FIT else function
    progress = (loop_of(trainer) if is_evaluating else trainer.fit_loop.epoch_loop).batch_progress.current
    is_fetching = progress.ready == progress.completed  # the next one is ready once it is fetched
    evaluated = progress.ready - (0 if is_fetching else 1) if is_evaluating else None
    samples: dict[str, list[Any]] = {}
    if has_begun and not (stage == TRAIN and (loaders.prefetches.is_on or step_fetches(trainer))):
        samples = dict(_samples(loaders, stage, is_fetching=is_fetching))
    return TrainingFailure(
        kind=type(exception).__name__,
        text=str(exception),
        function=function,
        epoch=trainer.current_epoch if function == FIT else 0,
        batch=batch if has_begun else None,
        evaluated=evaluated,
        samples=samples,
        rank=trainer.global_rank,
        time=time.time(),
        is_lost=isinstance(exception, RanksLostError),
    )


def _samples(loaders: Loaders, stage: str, *, is_fetching: bool) -> Iterator[tuple[str, list[Any]]]:
    """Yield the indices of the batch in progress for each loader that has an index sampler."""
    for place, tracker in loaders.trackers.items():
        if not place.startswith(stage) or not isinstance(tracker, TrackedLoader) or tracker.is_gone:
            continue
        iteration = tracker.iteration
        indices = iteration and _indices(iteration, iteration.num_out - (0 if is_fetching else 1))
        if indices:
            yield place, indices


def _indices(iteration: Iteration, number: int) -> list[Any] | None:
    """Return the indices of a batch of an iteration, if they are still known."""
    record = iteration.record
    begin = record.handed_out - len(record.recent)
    if not begin <= number < record.handed_out:
        return None
    batch = record.recent[number - begin]
    if hasattr(batch, "tolist"):
        batch = batch.tolist()
    listed = list(batch) if isinstance(batch, (list, tuple)) else [batch]
    return [index if isinstance(index, (int, str)) else repr(index)[:200] for index in listed]
