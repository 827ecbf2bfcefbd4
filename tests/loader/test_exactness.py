"""What happens to reasons why something is not exact."""

from __future__ import annotations

import logging

import pytest

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness


def test_strict_raises_and_collects_nothing() -> None:
    """Under strict a reason is an error, and no line of a report."""
    exactness = Exactness()
    with pytest.raises(NotExactError, match="the order differs"):
        exactness.refuse("the order differs")
    assert exactness.reasons == []


def test_without_strict_each_reason_is_collected_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Without strict a reason becomes a line of the report, with one warning."""
    exactness = Exactness(strict=False)
    with caplog.at_level(logging.WARNING):
        for reason in ("the order differs", "a generator is gone", "the order differs"):
            exactness.refuse(reason)
    assert exactness.reasons == caplog.messages == ["the order differs", "a generator is gone"]


def test_quietly_collected_reasons_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """If strict is None, a reason is collected without a warning, unless it is admitted."""
    exactness = Exactness(strict=None)
    with caplog.at_level(logging.WARNING):
        exactness.refuse("the order differs")
        exactness.admit("a worker has no generator")
    assert exactness.reasons == ["the order differs", "a worker has no generator"]
    assert caplog.messages == ["a worker has no generator"]


def test_a_reason_can_be_admitted_under_strict() -> None:
    """Where it is too late for an error, strict does not raise."""
    exactness = Exactness()
    exactness.admit("a worker died")
    assert exactness.reasons == ["a worker died"]


@pytest.mark.parametrize("strict", [True, False, None])
def test_a_worker_begins_without_reasons(strict: bool | None) -> None:
    """A worker's collector is as strict as the main process's, and has only its own reasons."""
    exactness = Exactness(strict=strict)
    exactness.admit("the order differs")
    of_worker = exactness.of_worker()
    assert (of_worker.strict, of_worker.reasons) == (strict, [])
