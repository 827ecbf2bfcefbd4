from __future__ import annotations

import pytest
import torch

from lightning_faulttolerant import TimestampedTimer


class Clock:
    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return a clock that advances on request, in place of the monotonic one."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_reports_say_the_step_and_the_total(clock: Clock) -> None:
    """The documented example gives the documented numbers."""
    lines: list[str] = []
    timer = TimestampedTimer(sink=lines.append)
    clock.seconds += 2
    assert timer.report("sleeping for 2 seconds") is None
    clock.seconds += 3
    assert timer.report("sleeping for 3 seconds", ret=True) == 3
    assert [line[24:].split() for line in lines] == [
        ["Start", "0.000", "ms,", "0.000", "s", "total"],
        ["sleeping", "for", "2", "seconds", "2,000.000", "ms,", "2.000", "s", "total"],
        ["sleeping", "for", "3", "seconds", "3,000.000", "ms,", "5.000", "s", "total"],
    ]


def test_it_prints_on_rank_0_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The rank is set by the environment, or by an argument."""
    TimestampedTimer("alone")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    TimestampedTimer("by the environment").report("x")
    TimestampedTimer("by argument", rank=0)
    printed = capsys.readouterr().out
    assert [name in printed for name in ("alone", "environment", "argument")] == [True, False, True]


def test_it_reports_where_its_rank_can_not_be_told_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer does not stop a script."""
    lines: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    TimestampedTimer(sink=lines.append)
    assert len(lines) == 1


def test_fault_it_runs_by_a_clock_that_can_be_set(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Turning back the time of day changes nothing."""
    timer = TimestampedTimer(rank=1)
    monkeypatch.setattr("time.time", lambda: -1e9)
    clock.seconds += 1
    assert timer.report("step", ret=True) == 1


def test_fault_it_has_no_state(clock: Clock) -> None:
    """The total continues in another process, including the running step, without the time in between."""
    timer = TimestampedTimer(running=60, rank=1)
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


def test_fault_gpu_work_that_still_runs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With sync_cuda the GPU finishes its work before each measurement of the time, once for each."""
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append(1))
    TimestampedTimer(rank=1).report("x")
    assert calls == []
    TimestampedTimer(rank=1, sync_cuda=True).report("x")
    assert len(calls) == 2
