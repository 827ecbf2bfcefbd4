"""The demonstration: it shows that nothing differs, and it would notice a difference."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.harness import python

DEMO = Path(__file__).parents[2] / "examples" / "demo"
NUM_BATCHES = 20
PLACES = [(epoch, batch) for epoch in range(2) for batch in range(NUM_BATCHES)]
EVENTS: list[dict[str, Any]] = [
    {"event": event, "epoch": epoch, "batch": batch, **more}
    for epoch, batch in PLACES
    for event, more in (("batch", {"content": f"{epoch} {batch}"}), ("step", {"loss": float(batch).hex()}))
]
EVENTS += [
    {"event": "validated", "epoch": 1, "metrics": {"val_loss": "0x1p-1", "val_accuracy": "0x1p-2"}},
    {"event": "end", "weights": "ab", "optimizers": "cd", "draws": {"torch": 0.5}},
]
RESUME = {"event": "resumed", "epoch": 1, "batch": 10, "exact": True, "text": "before batch 10 of epoch 1"}
# The uninterrupted process, one that is killed in batch 16 of epoch 1, and one that resumes before its batch 10.
KILLED, RESUMED = EVENTS[: 2 * (NUM_BATCHES + 16) + 1], EVENTS[2 * (NUM_BATCHES + 10) :]
ALTERED = [{**event, "loss": "0x1.8000000000001p+3"} if event.get("batch") == 12 else event for event in RESUMED]
OTHER_WEIGHTS = [*RESUMED[:-1], {**RESUMED[-1], "weights": "xy"}]
# What the second and the first process changes, and the beginning or a part of the only or first problem.
FALSIFIED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "an altered loss": ({"events": ALTERED}, {}, "0x1.8000000000001p+3"),
    "a missing event": ({"events": RESUMED[:-1]}, {}, "null"),
    "repeated events": ({"events": [*RESUMED[:2], *RESUMED]}, {}, "event"),
    "other weights": ({"events": OTHER_WEIGHTS}, {}, "xy"),
    "a restart from the beginning": ({"events": EVENTS, "resume": None}, {}, "process 2 began from the beginning"),
    "a kill that lost nothing": (
        {"events": RESUMED[12:], "resume": {**RESUME, "batch": 16}},
        {"autosave": (1, 16)},
        "no kill came between two autosaves",
    ),
}


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import the runner as a script does, with the files beside it importable."""
    monkeypatch.syspath_prepend(DEMO)
    for name in ("figure", "comparison", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("run")


@pytest.fixture
def processes(demo: ModuleType) -> list[Any]:
    """Return the whole process, and the killed and the resumed one that did the same."""
    whole = demo.Process(seed=1, seconds=1.0, events=EVENTS, resume=None, autosave=None)
    return [whole, replace(whole, events=KILLED, autosave=(1, 10)), replace(whole, events=RESUMED, resume=RESUME)]


def test_runs_that_are_the_same_have_no_problems(demo: ModuleType, processes: list[Any]) -> None:
    """A killed run that did the same has no problems, and repeated batches count once."""
    assert demo.problems(processes[0], processes[1:], NUM_BATCHES) == []
    assert len(demo.run_twice(*processes[1:])) == 6


@pytest.mark.parametrize("case", FALSIFIED)
def test_a_falsified_run_is_a_problem(demo: ModuleType, processes: list[Any], case: str) -> None:
    """Each difference is found and shown, and so is a demonstration that demonstrates nothing."""
    of_second, of_first, text = FALSIFIED[case]
    changed = [replace(processes[1], **of_first), replace(processes[2], **of_second)]
    assert text in demo.problems(processes[0], changed, NUM_BATCHES)[0]


def test_the_exit_code_tells_of_a_problem(
    demo: ModuleType, processes: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The demonstration ends with 0 if all is the same, with 1 if not, and draws the figure either way."""
    whole, killed, resumed = processes
    for last, code in ((resumed, 0), (replace(resumed, events=OTHER_WEIGHTS), 1)):
        monkeypatch.setattr(demo.Run, "start", lambda run, **_: run.processes.append(whole) or whole)
        monkeypatch.setattr(demo, "interrupt", lambda run, *_, last=last: run.processes.extend([killed, last]))
        assert demo.main(tmp_path) == code
    assert (tmp_path / "losses.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_shows_that_all_is_the_same(tmp_path: Path) -> None:
    """The whole demonstration has two kills, two resumes, identical results, and a figure; its processes are forked."""
    words = [sys.executable, str(DEMO / "run.py"), "--output", str(tmp_path / "made")]
    command = python.Command(words=words, directory=os.getcwd(), environment=dict(os.environ))
    exit_code, output = python.run(command, scratch=tmp_path / "scratch")
    assert exit_code == 0, output
    assert [output.count(text) for text in ("SIGKILL in batch", "resumed before batch", "DIFFERENT")] == [2, 2, 0]
    assert (tmp_path / "made" / "losses.png").read_bytes().startswith(b"\x89PNG")
