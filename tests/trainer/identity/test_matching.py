"""The fit that begins now is the one that starts alike, else the one with the same number, else a new one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.records.runs import FitRecord
from lightning_faulttolerant.trainer.identity.fingerprint import StartFingerprint, match_fit

Fits = dict[int, FitRecord | None]


def start(lr: float = 0.1, data: int = 0, weights: str = "w", **core: Any) -> StartFingerprint:
    """Return the start of a fit."""
    return StartFingerprint(core={"values": {"lr": lr}, **core}, data={"train": {"rows": data}}, weights=weights)


def fit(is_finished: bool = False, **how: Any) -> FitRecord:
    """Return the record of a fit with that start."""
    return FitRecord(start=start(**how).state_dict(), is_finished=is_finished)


FOLDS: Fits = {1: fit(True), 2: fit(True), 3: fit()}
RATES: Fits = {1: fit(True, lr=0.1), 2: fit(lr=0.2)}
ONE: Fits = {1: fit(lr=0.1)}
CASES: dict[str, tuple[Fits, StartFingerprint, dict[str, Any], int]] = {
    "first": ({}, start(), {}, 1),
    "second": ({}, start(), {"taken": (1,)}, 2),
    **{
        f"fold {n + 1}, without a seed": (FOLDS, start(weights="other"), {"taken": tuple(range(1, n + 1))}, n + 1)
        for n in range(4)
    },
    "skips finished fits": (RATES, start(lr=0.2), {}, 2),
    "skips them without a seed": (RATES, start(lr=0.2, weights="unseeded"), {}, 2),
    "another seed": ({1: fit(True, seed="1")}, start(seed="2", weights="v"), {}, 2),
    "other data": ({1: fit(True, data=1)}, start(data=2), {}, 2),
    "like none of several": (ONE, start(lr=0.3), {}, 2),
    "an edited script with one fit": (ONE, start(lr=0.3), {"runs_several": lambda: False}, 1),
    "no record": ({1: None}, start(), {}, 1),
    "an empty record": ({1: FitRecord()}, start(), {}, 1),
    "a finished trial is new": ({1: fit(True), 2: fit(lr=0.2)}, start(), {"is_sweep": True}, 3),
    "a trial": ({1: fit(True), 2: fit(lr=0.2)}, start(lr=0.2, weights="x"), {"is_sweep": True}, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_number_of_the_fit_that_begins(case: str) -> None:
    """How a fit starts decides before its number, and a fit that matches no fit of several is a new one."""
    fits, now, how, number = CASES[case]
    arguments = {"taken": (), "runs_several": lambda: True, "is_sweep": False, **how}
    assert match_fit(fits, arguments.pop("taken"), now, **arguments).number == number


def test_what_is_told_of_the_match() -> None:
    """A finished fit is not continued, a fit that is passed over is named, and a trial may be a guess."""
    several = {"runs_several": lambda: True, "is_sweep": False}
    assert [match_fit({1: fit(done)}, (), start(), **several).is_finished for done in (True, False)] == [True, False]  # type: ignore[arg-type]
    passed_over = match_fit(ONE, (), start(lr=0.3), **several).passed_over  # type: ignore[arg-type]
    assert passed_over == {1: ["values.lr: 0.1 when it was saved, 0.3 now"]}
    alike = FitRecord(start=StartFingerprint(weights="v").state_dict())
    found = match_fit({1: alike}, (), StartFingerprint(weights="w"), runs_several=lambda: True, is_sweep=True)
    assert (found.number, found.is_guess) == (2, True)
