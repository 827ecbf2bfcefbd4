"""The fit that begins now is the one that starts alike, else the one with the same number, else a new one."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.records.runs import FitRecord
from lightning_faulttolerant.trainer.identity.fingerprint import Match, StartFingerprint, match_fit


def start(lr: float = 0.1, data: int = 0, weights: str = "w", **core: Any) -> StartFingerprint:
    """Return the start of a fit."""
    return StartFingerprint(core={"values": {"lr": lr}, **core}, data={"train": {"rows": data}}, weights=weights)


def fit(is_finished: bool = False, **how: Any) -> FitRecord:
    """Return the record of a fit with that start."""
    return FitRecord(start=start(**how).state_dict(), is_finished=is_finished)


def match(
    fits: dict[int, FitRecord | None], now: StartFingerprint, *taken: int, several: bool = True, is_sweep: bool = False
) -> Match:
    """Return the matching fit."""
    return match_fit(fits, taken, now, runs_several=lambda: several, is_sweep=is_sweep)


def test_first_fit_of_a_run() -> None:
    """Without earlier fits, fits are numbered in their order."""
    assert [match({}, start()).number, match({}, start(), 1).number] == [1, 2]


def test_fits_in_their_order() -> None:
    """Folds that are run again match by number, finished or not; without a seed the weights differ."""
    fits: dict[int, FitRecord | None] = {1: fit(True), 2: fit(True), 3: fit()}
    begun: tuple[tuple[int, ...], ...] = ((), (1,), (1, 2), (1, 2, 3))
    assert [match(fits, start(weights="other"), *taken).number for taken in begun] == [1, 2, 3, 4]


def test_how_a_fit_starts_decides_before_its_number() -> None:
    """A script that skips finished fits finds the interrupted one."""
    fits: dict[int, FitRecord | None] = {1: fit(True, lr=0.1), 2: fit(lr=0.2)}
    assert match(fits, start(lr=0.2)).number == 2
    assert match(fits, start(lr=0.2, weights="unseeded")).number == 2


def test_seed_tells_fits_apart() -> None:
    """The finished fit of another seed does not match, nor does one with other data and the same weights."""
    fits: dict[int, FitRecord | None] = {1: fit(True, seed="1")}
    assert match(fits, start(seed="2", weights="v")).number == 2
    assert match({1: fit(True, data=1)}, start(data=2)).number == 2


def test_fit_that_matches_none_is_a_new_one() -> None:
    """In a script that runs several fits, it takes no other fit's state, and the interrupted fits are named."""
    found = match({1: fit(lr=0.1)}, start(lr=0.3))
    assert found.number == 2
    assert found.passed_over == {1: ["values.lr: 0.1 when it was saved, 0.3 now"]}


def test_edited_script_is_the_same_run() -> None:
    """In a script that runs one fit, it is found by its number, so that the difference is refused."""
    assert match({1: fit(lr=0.1)}, start(lr=0.3), several=False).number == 1


def test_fit_of_which_nothing_is_known() -> None:
    """Autosaves of a version that kept no record are found by their number."""
    assert match({1: None}, start()).number == 1
    assert match({1: FitRecord()}, start()).number == 1


def test_sweep_continues_after_what_is_finished() -> None:
    """In a persistent study, a trial with the values of a finished one is new."""
    fits: dict[int, FitRecord | None] = {1: fit(True), 2: fit(lr=0.2)}
    assert match(fits, start(), is_sweep=True).number == 3
    assert match(fits, start(lr=0.2, weights="unseeded"), is_sweep=True).number == 2


def test_trials_that_nothing_tells_apart() -> None:
    """Without distinguishing numbers, a trial takes no other trial's state, and this is reported."""
    alike = FitRecord(start=StartFingerprint(weights="v").state_dict())
    found = match({1: alike}, StartFingerprint(weights="w"), is_sweep=True)
    assert (found.number, found.is_guess) == (2, True)


@pytest.mark.parametrize("is_finished", [True, False])
def test_says_whether_it_is_finished(is_finished: bool) -> None:
    """A finished fit is not continued."""
    assert match({1: fit(is_finished)}, start()).is_finished is is_finished
