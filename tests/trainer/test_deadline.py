"""Deadlines: the values that users may pass, and how long before the deadline the run stops."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest

from lightning_faulttolerant.trainer.signals import RESERVE_SECONDS, Deadline, checked_deadline


def test_kinds_of_deadlines() -> None:
    """A datetime is a point in time, in local time if it has no zone; a timedelta counts from now; so do texts."""
    moment = datetime(2040, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert checked_deadline(moment) == moment.timestamp()
    assert checked_deadline(moment.astimezone(timezone(timedelta(hours=7)))) == moment.timestamp()
    assert checked_deadline(moment.astimezone().replace(tzinfo=None)) == moment.timestamp()
    assert checked_deadline(timedelta(hours=1)) == pytest.approx(time.time() + 3600, abs=5)
    assert checked_deadline(None) is None
    for text in ("2040-01-02 03:04:05+00:00", "2040-01-02T03:04:05Z", moment.isoformat()):
        assert checked_deadline(text) == moment.timestamp()
    assert checked_deadline("2040-01-02 03:04") == datetime(2040, 1, 2, 3, 4).timestamp()
    for duration in (timedelta(hours=4), timedelta(days=1, minutes=5), timedelta(days=20, seconds=1.5)):
        assert checked_deadline(str(duration)) == pytest.approx(time.time() + duration.total_seconds(), abs=5)


def test_longest_batch_counts() -> None:
    """One long batch, or one long pause between two batches, counts from then on."""
    run = SimpleNamespace(now=0.0, batch=0)
    clock = {"progress": lambda: run.batch, "clock": lambda: run.now}
    deadline = Deadline(1000.0, save_seconds=lambda: 0.0, **clock)  # type: ignore[arg-type]
    for pause in (1.0, 1.0, 100.0, 1.0):
        run.now, run.batch = run.now + pause, run.batch + 1
        assert not deadline.is_near()
    while not deadline.is_near():
        run.now, run.batch = run.now + 1, run.batch + 1
    assert run.now == pytest.approx(1000 - RESERVE_SECONDS - 100, abs=1.5)
