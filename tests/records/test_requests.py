"""What a replay requests and reports arrives as it was sent, and places in a fit are in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.records.requests import (
    RAISED,
    REPLAY_VARIABLE,
    ReplayOutcome,
    ReplayRequest,
    ReplayStart,
    StepPlace,
    read_outcomes,
    read_start,
    replay_requested,
    write_outcome,
    write_start,
)


def test_a_request_travels_through_the_environment() -> None:
    """A process reads what the command has requested; without the variable, it belongs to no replay."""
    request = ReplayRequest(directory="/there", fit=2, since=StepPlace(epoch=1, batch=2), dumps="/dump")
    assert replay_requested({REPLAY_VARIABLE: request.to_json()}) == request
    assert request.is_of_exception
    assert replay_requested({}) is None


def test_reports_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Start and outcomes come back; a rank that has not ended is missing, and so is a start that never came."""
    request = ReplayRequest(directory=str(tmp_path))
    assert read_start(request) is None
    start = ReplayStart(run="/run", number=9, exception="ValueError: no", place=StepPlace(epoch=1, batch=2))
    write_start(request, start)
    assert read_start(request) == start
    outcome = ReplayOutcome(word=RAISED, place=StepPlace(number=3, epoch=0, batch=3), text="ValueError: no")
    write_outcome(request, 1, outcome)
    assert read_outcomes(request) == {1: outcome}


@pytest.mark.parametrize("text", ["", "-1", "1:", "1:2:3", "a", "1.5"])
def test_what_is_no_step_is_refused(text: str) -> None:
    """A step is a number, or an epoch and a batch."""
    with pytest.raises(ValueError, match="neither the number of a step"):
        StepPlace.parse(text)


@pytest.mark.parametrize("limit", ["10", "1:2"])
def test_places_are_in_order(limit: str) -> None:
    """A place that is known in full is before, at, or after one that is named either way."""
    places = [StepPlace(number=number, epoch=number // 8, batch=number % 8) for number in (9, 10, 11, 16)]
    named = StepPlace.parse(limit)
    assert [place.is_before(named) for place in places] == [True, False, False, False]
    assert [place.is_after(named) for place in places] == [False, False, True, True]
