"""The demonstration: it shows that nothing differs, and it would notice a difference."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import python

DEMO = Path(__file__).parents[2] / "examples" / "demo"
NUM_BATCHES = 20

Event = dict[str, Any]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the runner as a script does, with the files beside it importable."""
    monkeypatch.syspath_prepend(DEMO)
    for name in ("figure", "comparison", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("run")


@pytest.fixture
def reference(demo: ModuleType) -> Any:
    """Return an uninterrupted process of two epochs."""
    events = [event for epoch in range(2) for batch in range(NUM_BATCHES) for event in batch_events(epoch, batch)]
    events.append({"event": "validated", "epoch": 1, "metrics": {"val_loss": "0x1p-1", "val_accuracy": "0x1p-2"}})
    events.append({"event": "end", "weights": "ab", "optimizers": "cd", "draws": {"torch": 0.5}})
    return demo.Process(seed=1, seconds=1.0, events=events, resume=None, autosave=None)


@pytest.fixture
def processes(reference: Any) -> list[Any]:
    """Return the same as two processes: one killed in batch 16 of epoch 1, one that resumed before its batch 10."""
    at = [(event.get("event"), event.get("epoch"), event.get("batch")) for event in reference.events]
    killed = reference.events[: at.index(("batch", 1, 16)) + 1]
    resumed = reference.events[at.index(("batch", 1, 10)) :]
    resume = {"event": "resumed", "epoch": 1, "batch": 10, "exact": True, "text": "before batch 10 of epoch 1"}
    return [replace(reference, events=killed, autosave=(1, 10)), replace(reference, events=resumed, resume=resume)]


def batch_events(epoch: int, batch: int) -> list[Event]:
    """Return the events that a recorder writes in one batch."""
    return [
        {"event": "batch", "epoch": epoch, "batch": batch, "content": f"{epoch} {batch}"},
        {"event": "step", "epoch": epoch, "batch": batch, "loss": float(batch).hex()},
    ]


def test_runs_that_are_the_same_have_no_problems(demo: ModuleType, reference: Any, processes: list[Any]) -> None:
    """A killed run that did the same has no problems, and repeated batches count once."""
    assert demo.problems(reference, processes, NUM_BATCHES) == []
    assert len(demo.run_twice(*processes)) == 6


def test_one_altered_loss_is_a_problem(demo: ModuleType, reference: Any, processes: list[Any]) -> None:
    """One loss that differs by one bit is found, and shown with both values."""
    events = [dict(event) for event in processes[1].events]
    altered = next(event for event in events if (event["event"], event["batch"]) == ("step", 12))
    altered["loss"] = "0x1.8000000000001p+3"
    [problem] = demo.problems(reference, [processes[0], replace(processes[1], events=events)], NUM_BATCHES)
    assert "0x1.8000000000000p+3" in problem
    assert "0x1.8000000000001p+3" in problem


@pytest.mark.parametrize(
    ("falsify", "message"),
    [
        (lambda events: events[:-1], "null"),
        (lambda events: [*events[:2], *events], "event"),
        (lambda events: [*events[:-1], {**events[-1], "weights": "xy"}], "xy"),
    ],
    ids=["missing", "repeated", "weights"],
)
def test_a_falsified_trace_is_a_problem(
    demo: ModuleType, reference: Any, processes: list[Any], falsify: Callable[[list[Event]], list[Event]], message: str
) -> None:
    """A missing event, an additional one, and other weights are found."""
    falsified = replace(processes[1], events=falsify(list(processes[1].events)))
    problems = demo.problems(reference, [processes[0], falsified], NUM_BATCHES)
    assert problems
    assert message in problems[0]


def test_a_restart_from_the_beginning_is_a_problem(demo: ModuleType, reference: Any, processes: list[Any]) -> None:
    """A restart that did everything again is reported, although the results are the same."""
    problems = demo.problems(reference, [processes[0], reference], NUM_BATCHES)
    assert problems == ["process 2 began from the beginning"]


def test_a_kill_at_an_autosave_is_reported(demo: ModuleType, reference: Any, processes: list[Any]) -> None:
    """A kill that lost nothing would not demonstrate anything."""
    at_autosave = replace(processes[0], autosave=(1, 16))
    resume = {**processes[1].resume, "batch": 16}
    resumed = replace(processes[1], resume=resume, events=processes[1].events[12:])
    [problem] = demo.problems(reference, [at_autosave, resumed], NUM_BATCHES)
    assert problem.startswith("no kill came between two autosaves")


def test_the_exit_code_tells_of_a_problem(
    demo: ModuleType, reference: Any, processes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demonstration ends with 0 if all is the same, with 1 if not, and draws the figure either way."""

    def end_with(run_processes: list[Any]) -> int:
        monkeypatch.setattr(demo.Run, "start", lambda run, **_: run.processes.append(reference) or reference)
        monkeypatch.setattr(demo, "interrupt", lambda run, *_: run.processes.extend(run_processes))
        return demo.main(tmp_path)

    assert end_with(processes) == 0
    events = [*processes[1].events[:-1], {**processes[1].events[-1], "weights": "xy"}]
    assert end_with([processes[0], replace(processes[1], events=events)]) == 1
    assert (tmp_path / "losses.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_that_all_is_the_same(tmp_path: Path) -> None:
    """The whole demonstration has two kills, two resumes, identical results, and a figure; its processes are forked."""
    made = tmp_path / "made"
    words = [sys.executable, str(DEMO / "run.py"), "--output", str(made)]
    command = python.Command(words=words, directory=os.getcwd(), environment=dict(os.environ))
    exit_code, output = python.run(command, scratch=tmp_path / "scratch")
    assert exit_code == 0, output
    assert output.count("SIGKILL in batch") == 2
    assert output.count("resumed before batch") == 2
    assert "DIFFERENT" not in output
    assert (made / "losses.png").read_bytes().startswith(b"\x89PNG")
