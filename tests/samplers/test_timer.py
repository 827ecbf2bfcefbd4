"""A timer reports the step and the total, by a clock that nobody sets, and continues after a resume."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import TimestampedTimer
from tests.messages import plain


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock in place of the monotonic one, which advances on request."""
    clock = SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr("time.monotonic", lambda: clock.seconds)
    return clock


def test_reports_say_the_step_and_the_total(clock: SimpleNamespace, snapshot: SnapshotAssertion) -> None:
    """The documented example gives the documented numbers."""
    lines: list[str] = []
    timer = TimestampedTimer(sink=lines.append)
    clock.seconds += 2
    assert timer.report("sleeping for 2 seconds") is None
    clock.seconds += 3
    assert timer.report("sleeping for 3 seconds", ret=True) == 3
    assert plain("\n".join(lines)) == snapshot


def test_it_prints_on_rank_0_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank is set by the environment, or by an argument; where it can't be known yet, it prints."""
    TimestampedTimer("alone")
    monkeypatch.setenv("WORLD_SIZE", "2")
    TimestampedTimer("unknown")
    monkeypatch.setenv("RANK", "1")
    TimestampedTimer("by the environment").report("x")
    TimestampedTimer("by argument", rank=0)
    printed = capsys.readouterr().out
    names = ("alone", "unknown", "environment", "argument")
    assert [name in printed for name in names] == [True, True, False, True]


def test_the_total_continues_in_another_process(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """It includes the running step, and neither the time in between nor a change of the time of day."""
    timer = TimestampedTimer(running=60, rank=1)
    monkeypatch.setattr("time.time", lambda: -1e9)
    clock.seconds += 2
    timer.report("step")
    clock.seconds += 1
    state = timer.state_dict()
    assert timer.running == 62
    again = TimestampedTimer(rank=1)
    clock.seconds += 500
    again.load_state_dict(state)
    assert again.state_dict() == state
    clock.seconds += 3
    again.report("step")
    assert again.running == 66
    with pytest.raises(ValueError, match="not a state"):
        again.load_state_dict({"running": 3})


def test_gpu_work_that_still_runs_is_waited_for_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sync_cuda the GPU finishes its work before each measurement of the time, once for each."""
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    TimestampedTimer(rank=1).report("x")
    assert calls == []
    TimestampedTimer(rank=1, sync_cuda=True).report("x")
    assert len(calls) == 2
