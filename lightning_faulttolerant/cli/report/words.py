"""The wording of a report (times, places, ends), shared by its text and its page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_faulttolerant.records import goodput
from lightning_faulttolerant.records.goodput import ContinuedEvaluation
from lightning_faulttolerant.records.history import Chapter, FitHistory, RunPlace, Unsaved, Validations, summed_times
from lightning_faulttolerant.records.requests import skips_in_words

RUNNING_SECONDS = 90.0
"""A run may still be running if its last sign of life is at most this old. Below a URL there is one a minute."""

KIND_NAMES = {
    goodput.TRAINING: "training that counted",
    goodput.EVALUATION: "evaluation that counted",
    goodput.DATA: "waiting for data",
    goodput.SAVING: "waiting for autosaves",
    goodput.OUTSIDE: "rest of the script",
    goodput.STARTING: "start of the first process",
    goodput.RESTORING: "restoring",
    goodput.REDONE: "work that was done again",
    goodput.HUNG: "hung",
    goodput.DOWN: "no process",
    goodput.RESTARTING: "starts of later processes",
}


SECTION_NAMES = {
    "data": "waiting for data",
    "step": "its steps",
    "evaluation": "evaluation",
    "save": "the state for its saves",
}
"""What a rank loses its time with, by the name of the section in a history."""


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


def place_text(place: RunPlace | None, *, in_evaluation: bool = False) -> str:
    """Return a place as ``epoch:batch``, in a validation run with its batch after that; or "-" if it is not known.

    Args:
        place: A place in a run.
        in_evaluation: Whether it is a place in ``validate``, ``test``, or ``predict``: then only its batch counts.
    """
    if place is None:
        return "-"
    if in_evaluation:
        return f"{place.num_validated or 0}"
    inside = "" if place.num_validated is None else f":{place.num_validated}"
    return f"{place.epoch}:{place.batch}{inside}"


def from_text(fit: FitHistory) -> str:
    """Return the place where a fit continued, or "start" if it began from the beginning.

    Args:
        fit: Any fit.
    """
    if fit.started is None:
        return "-"
    return "start" if fit.resumed is None else place_text(fit.place, in_evaluation=fit.is_evaluation)


def again_text(continued: ContinuedEvaluation, fit: FitHistory) -> str:
    """Return where a process continued an evaluation, and how many of its batches ran again.

    Args:
        continued: What is known of that.
        fit: The fit or evaluation in that process.
    """
    place, number = continued.place, continued.num_again
    if fit.is_evaluation and fit.resumed is None:
        where = f"ran {fit.name} from its start"
    elif fit.is_evaluation:
        where = f"continued {fit.name} before batch {place_text(place, in_evaluation=True)}"
    elif place is None:
        where = f"continued {fit.name}"
    else:
        run = "" if place.num_validated is None else f"batch {place.num_validated} of the validation run after "
        where = f"continued before {run}batch {place.batch} of epoch {place.epoch}"
    if number:
        least = "at least " if continued.was_killed else ""
        return f"{where}: {least}{number:,} {'batch' if number == 1 else 'batches'} of evaluation ran again."
    return f"{where}: no batch of evaluation {'is known to have run' if continued.was_killed else 'ran'} again."


def validation_text(runs: Sequence[Validations], duration: Callable[[float], str] = duration_text) -> str:
    """Return how many validation runs there were inside fits, and how long they took, without waiting for autosaves.

    Args:
        runs: All of them, at least one.
        duration: Returns the text for a number of seconds.
    """
    number, batches = sum(run.number for run in runs if run.is_over), sum(run.num_batches for run in runs)
    seconds = sum(run.seconds for run in runs)
    over = (
        f"{number:,} validation {'run' if number == 1 else 'runs'} inside fits" if number else "No validation run ended"
    )
    return f"{over}: {batches:,} {'batch' if batches == 1 else 'batches'} in {duration(seconds)}."


def who_waited(fits: Sequence[FitHistory]) -> str:
    """Return the word for what waits for autosaves in these fits and evaluations.

    Args:
        fits: At least one.
    """
    names = [
        name for name, is_evaluation in (("training", False), ("evaluation", True))
        if any(fit.is_evaluation is is_evaluation for fit in fits)
    ]  # fmt: skip
    return " and ".join(names).capitalize()


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


def skipped_texts(chapter: Chapter) -> Iterator[str]:
    """Yield a sentence for each training batch that was left out.

    Args:
        chapter: Any chapter.
    """
    has_several = any(fit.number > 1 for fit in chapter.fits)
    for number, skips in sorted(chapter.skipped().items()):
        of_fit = f" of fit {number}" if has_several else ""
        for one in skips:
            why = f". It could not be loaded: {one.text}" if one.text else ", by skip_batches"
            yield f"{skips_in_words((one.epoch, one.batch)).capitalize()}{of_fit} was left out{why}."


def slow_texts(fits: Sequence[FitHistory]) -> list[str]:
    """Return which ranks kept the others waiting, and in which section each of them lost the time.

    Args:
        fits: All fits.
    """
    autosaves = [autosave for fit in fits for autosave in fit.autosaves]
    number = sum(autosave.number for autosave in autosaves)
    return [
        f"Rank {slow.rank} was {slow.slower:.0%} slower than the median of the others, in {SECTION_NAMES[slow.section]}"
        f" (at {slow.number} of {number} autosaves)."
        for slow in summed_times([slow for autosave in autosaves for slow in autosave.slow])
    ]


def end_text(fit: FitHistory, *, is_last: bool, made: float) -> str:
    """Return the reason why a fit ended, in a few words.

    Args:
        fit: Any fit.
        is_last: Whether nothing is known of the run after the fit.
        made: The current time.
    """
    if fit.reason is not None:
        return fit.reason
    if is_last and made - fit.last_seen <= RUNNING_SECONDS:
        return "may be running"
    return "killed" if fit.started is not None else "killed at start"
