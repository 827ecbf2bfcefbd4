"""Messages about runs: which one a fit continues, which ones it does not, and what to type to choose another.

Finds which of a run's earlier fits is the one that begins now.
"""

from __future__ import annotations

import datetime
import os
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_faulttolerant.checkpoint.autosave_files import AUTOSAVE_NAME
from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.records.runs import RUN_ID_VARIABLE, Command, FitRecord
from lightning_faulttolerant.storage.store import is_url
from lightning_faulttolerant.trainer.identity.fingerprint import StartFingerprint
from lightning_faulttolerant.trainer.identity.starts import (
    autosaves_of,
    read_record,
    registry_of_process,
    start_directory,
)
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.process import has_told
from lightning_faulttolerant.trainer.resume.choice import Choice


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """The result of a search.

    Args:
        number: The number of the fit.
        passed_over: The unfinished fits that are not this one, each with its differences.
        is_guess: Whether nothing distinguishes one trial from another.
        is_finished: Whether that fit has finished.
    """

    number: int
    passed_over: Mapping[int, list[str]]
    is_guess: bool = False
    is_finished: bool = False


def match_fit(
    fits: Mapping[int, FitRecord | None],
    taken: Collection[int],
    start: StartFingerprint,
    *,
    runs_several: Callable[[], bool],
    is_sweep: bool = False,
) -> Match:
    """Return the number of the fit that begins. Its autosaves are kept under that number.

    Its start fingerprint takes precedence over its place in the order of the script's fits.

    Args:
        fits: The fits that have autosaves, by number; ``None`` if it is not known how one started.
        taken: The numbers of the fits that this script has already begun.
        start: How the fit that begins now starts.
        runs_several: Tells whether the script may run several fits, so one that matches none is a new one. Only called
            if it matters.
        is_sweep: Whether a later start may run other fits than an earlier one, or run them in another order.
    """
    place = len(taken) + 1
    same = {number for number, fit in fits.items() if start.has_function({} if fit is None else fit.start)}
    free = {number: fit for number, fit in sorted(fits.items()) if number in same and number not in taken}
    known = {number: fit for number, fit in free.items() if fit is not None and fit.start}
    unfinished = [number for number, fit in known.items() if not fit.is_finished]
    found = _first_match(known, unfinished, place, start, is_sweep=is_sweep)
    if found is None and not is_sweep and place in free and (place not in known or not runs_several()):
        found = place
    is_guess = is_sweep and found is None and any(start.has_core(known[number].start) for number in unfinished)
    if found is None:
        found = place if place not in fits and place not in taken else 1 + max((*fits, *taken), default=0)
    others = [number for number in unfinished if number != found]
    return Match(
        number=found,
        passed_over={number: start.differs(known[number].start) for number in others},
        is_guess=is_guess,
        is_finished=found in known and known[found].is_finished,
    )


def _first_match(
    known: Mapping[int, FitRecord], unfinished: list[int], place: int, start: StartFingerprint, *, is_sweep: bool
) -> int | None:
    candidates = unfinished if is_sweep else [*([place] if place in known else []), *unfinished]
    exact = [number for number in candidates if start.is_exactly(known[number].start)]
    if exact:
        return exact[0]
    alike = [number for number in candidates if start.has_core(known[number].start)]
    if is_sweep:
        # Without a seed, the weights differ. A fit without its own numbers can't be distinguished from another trial.
        alike = [number for number in alike if start.has_data(known[number].start) and start.is_told_apart]
        return alike[0] if alike else None
    for number in alike:
        saved = known[number].start
        is_by_place = number == place and not (start.has_weights(saved) and not start.has_data(saved))
        if is_by_place or start.has_data(saved):
            return number
    return None


_PROGRAM = "lightning-faulttolerant"
_MAX_LINES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Interrupted:
    """A run that has autosaves, and is not the one that continues.

    Args:
        directory: The directory of the run.
        command: The command that started it.
    """

    directory: str
    command: Command


def tell_interrupted(runs: Sequence[Interrupted], command: Command) -> None:
    """Name the most recently saved interrupted run of the same script when a fit starts from the beginning.

    Args:
        runs: All interrupted runs.
        command: The command of this process.
    """
    newest = max(runs, key=lambda run: _newest(run.directory)[0], default=None)
    if newest is None:
        return
    saved_at, name = _newest(newest.directory)
    when = f", saved {datetime.datetime.fromtimestamp(saved_at):%Y-%m-%d %H:%M}" if saved_at else ""
    match = AUTOSAVE_NAME.fullmatch(name)
    place = f" at epoch {match['epoch']}, batch {match['batch']}" if match else ""
    line = newest.command.line(here=command.directory)
    more = f" There are {len(runs) - 1} more." if len(runs) > 1 else ""
    tell(
        f"This fit starts from the beginning. An interrupted run of {command.name} is{place}{when}:"
        f" {_difference(newest.command, command)}.{more} To continue it, type: {line}, or set"
        f" {RUN_ID_VARIABLE}={shlex.quote(os.path.basename(newest.directory))}"
    )


def tell_passed_over(match: Match, *, run_id: str) -> None:
    """Report once which interrupted fits of this run a new fit does not continue, and why.

    Args:
        match: The result of the search.
        run_id: The id of this run.
    """
    if match.is_guess and "guess" not in has_told:
        has_told.add("guess")
        tell(
            "This trial starts from the beginning: it can't be distinguished from other trials of this sweep. So that "
            'an interrupted trial continues, give each a callback FaultTolerance(run_id=f"trial-{trial.number}").'
        )
    if not match.passed_over or run_id in has_told:
        return
    has_told.add(run_id)
    number, lines = next(iter(match.passed_over.items()))
    what = "; ".join(lines[:_MAX_LINES]) or "its initial weights"
    tell(f"This fit starts from the beginning. It is not fit {number} of {run_id}, which was interrupted: {what}.")


def advise(exception: BaseException, choice: Choice | None) -> None:
    """Append two lines to the error for a run that differs: how to continue it, and how to start over.

    Args:
        exception: The exception that ends a fit.
        choice: The checkpoint that the fit starts from.
    """
    path = "" if choice is None or not choice.is_autosave else str(choice.path)
    directory = path.rpartition("/")[0].rpartition("/")[0]
    record = read_record(directory) if isinstance(exception, FingerprintMismatchError) and path else None
    if record is None:
        return
    exception.args = (
        f"{exception}\n"
        f"To continue the interrupted run, undo the change and type: {record.command.line()}\n"
        f"To start over, type: {discard_line(directory)}",
    )


def discard_line(directory: str) -> str:
    """Return the command that lets a run start over.

    Args:
        directory: The directory of the run.
    """
    has_registry = registry_of_process(start_directory(os.environ)) is not None
    return f"{_PROGRAM} discard {shlex.quote(os.path.basename(directory) if has_registry else directory)}"


def _newest(directory: str) -> tuple[float, str]:
    """Return the time of a run's newest autosave, as far as it is known, and its name."""
    found = autosaves_of(directory)
    if is_url(directory):
        return (0.0, found[-1][1]) if found else (0.0, "")
    return max(((_saved_at(os.path.join(directory, *one)), one[1]) for one in found), default=(0.0, ""))


def _saved_at(path: str) -> float:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def _difference(one: Command, other: Command) -> str:
    if one.arguments != other.arguments:
        return f"it was started with other arguments ({shlex.join(one.arguments) or 'none'})"
    if one.task != other.task:
        return f"it is another task ({one.task or 'none'})"
    if one.script != other.script:
        return f"it belongs to {one.script}, and starts differently"
    return "it starts differently"
