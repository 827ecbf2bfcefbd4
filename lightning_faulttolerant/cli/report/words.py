"""The wording of a report (times, places, ends), shared by its text and its page."""

from __future__ import annotations

from lightning_faulttolerant.records import goodput
from lightning_faulttolerant.records.history import FitHistory, RunPlace, Unsaved

RUNNING_SECONDS = 90.0
"""A run may still be running if its last sign of life is at most this old. Below a URL there is one a minute."""

KIND_NAMES = {
    goodput.TRAINING: "training that counted",
    goodput.SAVING: "waiting for autosaves",
    goodput.OUTSIDE: "outside of fits",
    goodput.STARTING: "start of the first process",
    goodput.RESTORING: "restoring",
    goodput.REDONE: "work that was done again",
    goodput.DOWN: "no process",
    goodput.RESTARTING: "starts of later processes",
}


def duration_text(seconds: float) -> str:
    """Return a duration in at most seven characters.

    Args:
        seconds: From 0.

    Example:
        >>> [duration_text(seconds) for seconds in (0, 0.0123, 1.25, 59.96, 3599.6, 86399.0, 200_000)]
        ['0 s', '12 ms', '1.2 s', '60 s', '1h 00m', '24h 00m', '2d 08h']
    """
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return "60 s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60}m {round(seconds) % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def place_text(place: RunPlace | None) -> str:
    """Return a place as ``epoch:batch``, or "-" if it is not known.

    Args:
        place: A place in a run.
    """
    return "-" if place is None else f"{place.epoch}:{place.batch}"


def from_text(fit: FitHistory) -> str:
    """Return the place where a fit continued, or "start" if it began from the beginning.

    Args:
        fit: Any fit.
    """
    if fit.started is None:
        return "-"
    return "start" if fit.resumed is None else place_text(fit.place)


def unsaved_text(unsaved: Unsaved, fit: FitHistory) -> str:
    """Return how long a fit could save nothing, and why.

    Args:
        unsaved: The time in which nothing was saved.
        fit: The fit.
    """
    ended = fit.last_seen if unsaved.until is None else unsaved.until
    still = ", to its end" if unsaved.until is None else ""
    tries = f"{unsaved.tries} {'try' if unsaved.tries == 1 else 'tries'}"
    return f"could save nothing for {duration_text(ended - unsaved.since)}{still}, {tries}: {unsaved.text}"


def end_text(fit: FitHistory, *, is_last: bool, made: float) -> str:
    """Return the reason why a fit ended, in a few words.

    Args:
        fit: Any fit.
        is_last: Whether nothing is known of the run after the fit.
        made: The current time.
    """
    if fit.reason is not None:
        return fit.reason.removeprefix("stopped by ")
    if is_last and made - fit.last_seen <= RUNNING_SECONDS:
        return "may be running"
    return "killed" if fit.started is not None else "killed at start"
