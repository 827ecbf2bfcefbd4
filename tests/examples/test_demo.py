"""The demonstration: it shows that nothing differs, and it would notice a difference."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness import python

DEMO = Path(__file__).parents[2] / "examples" / "demo"
NUM_BATCHES = 20
EVENTS: list[dict[str, Any]] = [
    {"event": event, "epoch": epoch, "batch": batch, **more}
    for epoch in range(2)
    for batch in range(NUM_BATCHES)
    for event, more in (("batch", {"content": f"{epoch} {batch}"}), ("step", {"loss": float(batch).hex()}))
]
EVENTS += [{"event": "end", "weights": "ab", "optimizers": "cd", "draws": {"torch": 0.5}}]
RESUME = {"event": "resumed", "epoch": 1, "batch": 10, "exact": True, "text": "before batch 10 of epoch 1"}
# A process that is killed in batch 16 of epoch 1, and one that resumes before its batch 10.
KILLED, RESUMED = EVENTS[: 2 * (NUM_BATCHES + 16) + 1], EVENTS[2 * (NUM_BATCHES + 10) :]
# What the second and the first process changes, and a part of the first problem, if there is one.
CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": ({}, {}, ""),
    "other weights": ({"events": [*RESUMED[:-1], {**RESUMED[-1], "weights": "xy"}]}, {}, "xy"),
    "a missing event": ({"events": RESUMED[:-1]}, {}, "null"),
    "a restart from the beginning": ({"events": EVENTS, "resume": None}, {}, "process 2 began from the beginning"),
    "a kill that lost nothing": (
        {"events": RESUMED[12:], "resume": {**RESUME, "batch": 16}},
        {"autosave": (1, 16)},
        "no kill came between two autosaves",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_falsified_run_is_a_problem(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each difference is found and shown, and so is a demonstration that demonstrates nothing."""
    monkeypatch.syspath_prepend(DEMO)
    for name in ("figure", "comparison", "run"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    demo = importlib.import_module("run")
    whole = demo.Process(seed=1, seconds=1.0, events=EVENTS, resume=None, autosave=None)
    of_second, of_first, text = CHANGED[case]
    killed = replace(whole, **{"events": KILLED, "autosave": (1, 10), **of_first})
    resumed = replace(whole, **{"events": RESUMED, "resume": RESUME, **of_second})
    found = demo.problems(whole, [killed, resumed], NUM_BATCHES)
    assert (text in found[0]) if text else found == []


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
