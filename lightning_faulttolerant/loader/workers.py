"""Which worker supplied which batch of an iterable data set: in turn, among the workers that still have data.

Ends worker processes without the main process treating their end as a fault.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.ring import WorkerRing

_WAIT_SECONDS = 5.0


def round_of(num_batches: int, ends: list[int | None]) -> tuple[int, int]:
    """Return the last round that began at or before batch `num_batches`, and the number of batches before it.

    Args:
        num_batches: The number of batches yielded.
        ends: The total number of batches of each worker that has run out, ``None`` for the others.
    """
    rounds = bisect_right(range(num_batches + 1), num_batches, key=lambda r: _num_before(r, ends)) - 1
    return rounds, _num_before(rounds, ends)


def _num_before(rounds: int, ends: list[int | None]) -> int:
    return sum(rounds if end is None else min(rounds, end) for end in ends)


def counts_at(ring: WorkerRing, iteration: int, num_batches: int) -> tuple[list[int], int]:
    """Return how many batches each worker had fetched when the round of `num_batches` began, and the rest to drop."""
    spans = _spans(ring, iteration)
    rounds, before = round_of(num_batches, [None if last is None else last - first for first, last in spans])
    counts = [first + rounds if last is None else min(first + rounds, last) for first, last in spans]
    return counts, num_batches - before


def counts_now(ring: WorkerRing, iteration: int, num_given: int) -> list[int]:
    """Return how many batches each worker has fetched once it has finished its work.

    Raises:
        NotExactError: If that is unknown, because some have run out and others were cut off.
    """
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        spans = _spans(ring, iteration)
        if all(last is not None for _, last in spans):
            return [last for _, last in spans if last is not None]
        counts = [first - (worker - num_given) // ring.num_workers for worker, (first, _) in enumerate(spans)]
        if all(last is None and ring.has(w, counts[w]) for w, (_, last) in enumerate(spans)):
            return counts
        if time.monotonic() > deadline:
            raise NotExactError(
                "An epoch ended while some of the persistent workers had run out of samples of their iterable data "
                "set and others had not. How far these have fetched ahead depends on their speed, so their random "
                "draws could not continue exactly. Pass persistent_workers=False."
            )
        time.sleep(0.001)


def _spans(ring: WorkerRing, iteration: int) -> list[tuple[int, int | None]]:
    try:
        return [ring.span(worker, iteration) for worker in range(ring.num_workers)]
    except LookupError as error:
        raise NotExactError(
            f"The position of a data-loading worker could not be read: {error}. Its samples could not continue exactly."
        ) from error


@contextlib.contextmanager
def default_sigchld() -> Iterator[None]:
    """Ignore the deaths of child processes."""
    try:
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except (ValueError, AttributeError):  # not the main thread, or the signal doesn't exist on this platform
        handler = None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGCHLD, handler)


def end_children(process_ids: Sequence[int], *, timeout_seconds: float) -> None:
    """End those children of these process ids that still exist; kill those that don't exit in time."""
    children = {child.pid: child for child in multiprocessing.active_children()}
    found = [children[process_id] for process_id in process_ids if process_id in children]
    if not found:
        return
    # torch's SIGCHLD handler raises in the main process when a worker is killed.
    with default_sigchld():
        for child in found:
            child.terminate()
        deadline = time.monotonic() + timeout_seconds
        for child in found:
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive() and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)
                child.join(timeout_seconds)
