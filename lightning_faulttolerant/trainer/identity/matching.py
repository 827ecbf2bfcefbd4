"""Finds which of a run's earlier fits is the one that begins now."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from lightning_faulttolerant.records.runs import FitRecord
from lightning_faulttolerant.trainer.identity.fingerprint import StartFingerprint


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
        # Without a seed, the weights differ. A fit without numbers of its own can't be told from another trial.
        alike = [number for number in alike if start.has_data(known[number].start) and start.is_told_apart]
        return alike[0] if alike else None
    for number in alike:
        saved = known[number].start
        is_by_place = number == place and not (start.has_weights(saved) and not start.has_data(saved))
        if is_by_place or start.has_data(saved):
            return number
    return None
