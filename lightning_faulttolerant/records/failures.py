"""How often a run fails, and what a save costs it, from its history.

A failure ends a fit or an evaluation and loses work: it was killed, or it ended without saving where it was. A stop
that saved its state is none. Only the time after the first batch counts: a failure at the start has no work to lose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from lightning_faulttolerant.records.chapters import history_of
from lightning_faulttolerant.records.history import Autosave, FitHistory, RunHistory, RunPlace
from lightning_faulttolerant.records.lines import Line

_NUM_RECENT = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """The failures of a run so far.

    Args:
        number: How many there were.
        seconds: The time in which they came, from the first batch of each fit to its end.
        save_seconds: How long training waits for an autosave; ``None`` if no autosave is known.
    """

    number: int = 0
    seconds: float = 0.0
    save_seconds: float | None = None

    def mean_seconds_between(self, more: float = 0.0) -> float:
        """Return the mean time between two failures, in seconds; infinity if there was none.

        Args:
            more: How many seconds the present process has trained without a failure.
        """
        return (self.seconds + more) / self.number if self.number else math.inf


def best_interval(save_seconds: float, failure_seconds: float) -> float:
    """Return the time from one save to the next with which the least time is lost, in seconds.

    Args:
        save_seconds: How long a save takes.
        failure_seconds: The mean time between two failures.

    Source: J. W. Young, A first order approximation to the optimum checkpoint interval, 1974. The limit for expensive
        saves is that of J. T. Daly, A higher order estimate of the optimum checkpoint interval, 2006.

    Example:
        >>> best_interval(0.5, 3600.0), best_interval(0.5, 0.5)
        (60.0, 0.5)
    """
    return min(math.sqrt(2.0 * save_seconds * failure_seconds), failure_seconds)


def failures_of(lines: Iterable[Line], *, fit: int) -> Failures:
    """Return the failures before a fit that has just begun, which the last lines are about.

    Args:
        lines: The lines of the history.
        fit: The number of the fit. Only its autosaves tell what a save costs.
    """
    history = history_of(lines)
    fits = [each for chapter in history.chapters for each in chapter.fits][:-1]
    started = [each for each in fits if each.started is not None]
    return Failures(
        number=sum(map(is_failure, started)),
        seconds=math.fsum(each.last_seen - (each.started or 0.0) for each in started),
        save_seconds=_save_seconds(history, fit),
    )


def is_failure(fit: FitHistory) -> bool:
    """Return whether a fit or an evaluation has ended with a loss of work.

    Args:
        fit: One that is over.
    """
    if fit.started is None or fit.is_finished:
        return False
    if fit.reason is None:
        return True
    return fit.last_place is not None and (fit.saved is None or _order(fit, fit.saved) < _order(fit, fit.last_place))


def _order(fit: FitHistory, place: RunPlace) -> tuple[float, ...]:
    # A validation run may be repeated after a stop that saved its start: no other interval would save it.
    return place.order if fit.is_evaluation else (place.epoch, place.batch)


def _save_seconds(history: RunHistory, fit: int) -> float | None:
    processes = chain.from_iterable(chapter.processes for chapter in history.chapters)
    series = [each.autosaves for process in processes for each in process.fits if each.number == fit]
    # The first save of a process takes longer: much of its work is done only once.
    later = [autosave for autosaves in series for autosave in autosaves[1:]]
    found: list[Autosave] = (later or list(chain.from_iterable(series)))[-_NUM_RECENT:]
    return fmean(autosave.seconds / autosave.number for autosave in found) if found else None
