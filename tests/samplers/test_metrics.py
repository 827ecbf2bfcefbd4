"""Metrics are reduced over calls and ranks once, by name, exactly, and a state continues in the middle of a step.

A timer reports the step and the total, by a clock that nobody sets, and continues after a resume.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import FaultToleranceError, MetricsTracker, NotExactError, TimestampedTimer
from tests.damage import bytes_of
from tests.messages import error_of, plain
from tests.ranks import on_ranks


def test_the_documented_loop_runs() -> None:
    """Every call can be chained, local is of the step, agg of the epoch, and reports are kept."""
    metrics = MetricsTracker()
    for epoch in range(2):
        for step in range(3):
            metrics.update({"images_seen": 4, "loss": torch.tensor(0.5)}).reduce()
            assert dict(metrics.local) == {"images_seen": 4.0, "loss": 0.5}
            assert metrics.agg["images_seen"] == 4 * (step + 1)
            metrics.reset_local()
        assert len(metrics.end_epoch().epoch_reports) == epoch + 1
        assert dict(metrics.agg) == {}
    assert [report["loss"] for report in metrics.epoch_reports] == [1.5, 1.5]
    for reduce_op, expected in (("sum", 9), ("mean", 3), ("min", 2), ("max", 4), ({"y": "max"}, 9)):
        metrics = MetricsTracker(reduce_op)  # type: ignore[arg-type]
        metrics.update({"x": 3}).update({"x": 2}).reduce().reset_local().update({"x": 4})
        assert metrics.reduce().agg["x"] == expected


def _cases(rank: int) -> Any:
    found: dict[str, Any] = {}
    metrics = MetricsTracker()
    metrics.update({"loss": 1, "n": 100} if rank == 0 else {"n": 100, "loss": 1}).reduce()
    found["order"] = dict(metrics.local)
    metrics.reduce()
    found["twice"] = [dict(metrics.local), dict(metrics.agg)]
    metrics.reset_local().update({f"only {rank}": rank + 1}).reduce()
    found["sets"] = dict(metrics.local)
    state = metrics.state_dict()
    if rank == 0:  # one rank does not know the names that all had agreed on
        metrics = MetricsTracker().load_state_dict(state)
    metrics.reset_local()
    found["after load"] = dict((metrics.update({"loss": 4}) if rank == 1 else metrics).reduce().local)
    second = MetricsTracker()
    second.reduce()
    if rank == 1:
        second.update({"late": 5})
    found["late"] = dict(second.reduce().local)
    found["large"] = MetricsTracker().update({"n": 2**24 + rank}).reduce().agg["n"]
    ops = MetricsTracker({"m": "mean", "lo": "min", "hi": "max"})
    for value in (1, 2, 3) if rank == 0 else (10,):
        ops.update({"m": value, "lo": value, "hi": value})
    found["ops"] = dict(ops.reduce().agg)
    try:
        MetricsTracker("sum" if rank else "max").update({"x": 1}).reduce()
    except FaultToleranceError as error:
        found["differ"] = str(error)
    pending = MetricsTracker().update({"x": 1})
    states: list[Any] = [None, None]
    dist.all_gather_object(states, pending.state_dict())
    found["own"] = dict(MetricsTracker().load_state_dict(states[rank]).reduce().agg)
    try:
        MetricsTracker().load_state_dict(states[1 - rank])
    except NotExactError as error:
        found["other"] = str(error)
    return found


EXPECTED = {
    "order": {"loss": 2.0, "n": 200.0},
    "twice": [{"loss": 2.0, "n": 200.0}] * 2,
    "sets": {"only 0": 1.0, "only 1": 2.0},
    "after load": {"loss": 4.0},
    "late": {"late": 5.0},
    "large": 2**25 + 1,
    "ops": {"m": 4.0, "lo": 1.0, "hi": 10.0},
    "own": {"x": 2.0},
}
"""Values of any names in any order are summed once, exactly, and a mean weighs values, not ranks."""


def test_ranks_agree(tmp_path: Any, snapshot: SnapshotAssertion) -> None:
    """Two ranks reduce and agree, all get the errors, and each takes its own unreduced values only."""
    found = on_ranks(_cases, tmp_path)
    for name, expected in EXPECTED.items():
        assert [of_rank[name] for of_rank in found] == [expected] * 2, name
    assert [(of_rank["differ"], of_rank["other"]) for of_rank in found] == snapshot


def test_a_state_is_plain_and_continues_in_the_middle_of_a_step() -> None:
    """The state loads with weights_only=True, stays as saved, and is restored completely."""
    metrics = MetricsTracker({"m": "mean"})
    metrics.update({"m": 1, "n": 2}).end_epoch().update({"m": 3}).reduce().update({"m": 5, "n": 1})
    state = torch.load(io.BytesIO(bytes_of(metrics.state_dict())), weights_only=True)
    kept = metrics.state_dict()
    metrics.update({"m": 100}).reduce().end_epoch()
    assert kept == state
    again = MetricsTracker({"m": "mean"}).load_state_dict(state)
    assert again.state_dict() == state
    assert dict(again.reduce().agg) == {"m": 4.0, "n": 1.0}
    state["epoch_reports"].clear()
    assert len(again.epoch_reports) == 1


OF_THE_ORIGINAL = {"epoch_reports": [{"loss": 1.0}], "agg": {"loss": 2.0}}
OF_ANOTHER_RANK = {**MetricsTracker().update({"x": 1}).state_dict(), "rank": 1, "num_ranks": 2}


def test_other_states_are_taken_as_far_as_possible(caplog: pytest.LogCaptureFixture) -> None:
    """The original's sums are taken; another rank's values are left out with strict=False, which is logged."""
    metrics = MetricsTracker().load_state_dict(OF_THE_ORIGINAL).update({"loss": 1}).reduce()
    assert metrics.end_epoch().epoch_reports == [{"loss": 1.0}, {"loss": 3.0}]
    assert dict(MetricsTracker().load_state_dict(OF_ANOTHER_RANK, strict=False).local) == {}
    assert "values of rank 1 of 2" in caplog.text


REFUSED: dict[str, tuple[Callable[[MetricsTracker], Any], type[Exception]]] = {
    "a tensor": (lambda m: m.update({"a": 1, "b": torch.zeros(2)}), TypeError),
    "an operation": (lambda m: MetricsTracker("product"), ValueError),
    "a type": (lambda m: MetricsTracker(dtype=torch.int64), ValueError),
    "a write": (lambda m: m.local.__setitem__("x", 1.0), AttributeError),  # type: ignore[attr-defined]
    "half a state": (lambda m: m.load_state_dict({"agg": {}}), ValueError),
    "a newer state": (lambda m: m.load_state_dict({**OF_THE_ORIGINAL, "version": 9}), ValueError),
    "sums for a mean": (lambda m: MetricsTracker("mean").load_state_dict(OF_THE_ORIGINAL), NotExactError),
    "another rank's": (lambda m: m.load_state_dict(OF_ANOTHER_RANK), NotExactError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_is_refused(case: str, snapshot: SnapshotAssertion) -> None:
    """A refused call adds nothing, and what is read can't be written to by mistake."""
    call, kind = REFUSED[case]
    metrics = MetricsTracker()
    assert error_of(kind, lambda: call(metrics)) == snapshot
    assert dict(metrics.local) == dict(metrics.agg) == {}


# The timer


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
