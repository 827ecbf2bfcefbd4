"""Wrong usage of ``replay`` is told before any script is started; what a script tells of its replay is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.records.lines import append_line
from lightning_faulttolerant.records.requests import LEFT, RAISED, REACHED
from tests.cli.checkpoints import call, told

Capture = pytest.CaptureFixture[str]

REFUSED = [
    (),
    ("--until", "3", "--at-exception"),
    ("--from", "1:3", "--until", "1:2"),
    ("--until", "x"),
    ("--until", "1", "--fit", "0"),
    ("--until", "1", "--set", "lr=1"),
    ("--until", "1", "--dump", "DIR"),
    ("--until", "1", "--output", "DIR"),
]


def test_options_that_make_no_sense_are_refused(tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """The message says what is wrong, and the script is not started, or does not exist."""
    started = tmp_path / "started"
    (tmp_path / "file").touch()
    script = ("--", sys.executable, "-c", f"open({str(started)!r}, 'w')")
    calls = [(*(word.replace("DIR", str(tmp_path)) for word in options), *script) for options in REFUSED]
    found = [call(capsys, "replay", *words) for words in (*calls, ("--until", "1", "--", "no-such-command"))]
    assert {each.status for each in found} == {2}
    assert "\n".join(told(each, DIR=tmp_path).splitlines()[-1] for each in found) == snapshot
    assert not started.exists()


def test_a_script_that_trains_nothing_is_no_replay(tmp_path: Path, capsys: Capture) -> None:
    """A script without a fit is reported as such, with its exit code if it fails, and nothing is left behind."""
    for code, why in (("1", "the script has no such fit"), ("exit(3)", "the script ended with exit code 3")):
        found = call(capsys, "replay", "--until", "1", "--output", tmp_path, "--", sys.executable, "-c", code)
        assert (found.status, f"fit 1 was not replayed: {why}." in found.err) == (2, True)
        assert list(tmp_path.iterdir()) == []


# Does what a script does in a replay: each rank tells how it ended, and writes its ledger.
SCRIPT = """
import json, sys
from lightning_faulttolerant.records.ledger import path_of_rank
from lightning_faulttolerant.records.lines import append_line
from lightning_faulttolerant.records.requests import *
from lightning_faulttolerant.records.requests import write_outcome, write_start
request, (start, ends, ledgers) = replay_requested(), json.loads(sys.argv[1])
write_start(request, ReplayStart(**start))
for rank, (word, text) in enumerate(ends):
    write_outcome(request, rank, ReplayOutcome(word=word, place=StepPlace(epoch=0, batch=rank + 1), text=text))
for rank, lines in enumerate(ledgers):
    for line in lines:
        append_line(path_of_rank(request.ledger, rank), line)
"""


def replayed(capsys: Capture, option: str, start: dict[str, Any], ends: Any, ledgers: Any = ()) -> tuple[int, str]:
    """Replay the script with these ends; return the status and what is said."""
    words = (sys.executable, "-c", SCRIPT, json.dumps([start, ends, ledgers]))
    found = call(capsys, "replay", option, "--", *words)
    return found.status, found.out + found.err


LOST, ERROR = (RAISED, "RanksLostError: rank 1 is lost"), (RAISED, "ValueError: no")
IS_RAISED = "raised in batch 2 of epoch 0: ValueError: no"
IS_LEFT = "left in batch 1 of epoch 0, by the debugger"


@pytest.mark.parametrize(
    ("ends", "exception", "end", "status"),
    [
        ([LOST, ERROR], ERROR[1], IS_RAISED, 0),
        ([(RAISED, "RuntimeError: closed"), ERROR], ERROR[1], IS_RAISED, 0),
        ([LOST, ERROR], "TypeError: no", IS_RAISED, 1),
        ([LOST, (REACHED, "")], ERROR[1], "raised in batch 1 of epoch 0: RanksLostError: rank 1 is lost", 1),
        ([(LEFT, ""), LOST], None, IS_LEFT, 0),
        ([(REACHED, ""), ERROR], None, IS_RAISED, 2),
    ],
)
def test_the_rank_that_ended_the_replay_decides(
    ends: list[tuple[str, str]], exception: str | None, end: str, status: int, capsys: Capture
) -> None:
    """A rank that only lost another one hides neither the exception of that rank nor that the user left."""
    found = replayed(capsys, "--at-exception" if exception else "--until=9", {"exception": exception}, ends)
    assert (found[0], end in found[1]) == (status, True), found


def batch(number: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    """Return the line of a batch."""
    return {"event": "batch", "epoch": 0, "batch": number, "order": "o", "loss": loss.hex(), **more}


def log(number: int, value: float, *, epoch_end: bool = False) -> dict[str, Any]:
    """Return the line of logged values."""
    place = {"epoch": 0, "batch": number, "step": 1, "validating": False, "logger": None}
    return {"event": "log", **place, "metrics": {"loss": value.hex()}, "epoch_end": epoch_end}


LOGGED = [batch(1), log(2, 0.5), log(2, 0.75, epoch_end=True)]
# The lines of the run and of the replay, for each rank, and what is said.
COMPARED: dict[str, tuple[list[Any], list[Any], list[str]]] = {
    "steps of both": ([[batch(0), batch(1), batch(3)]], [[batch(1), batch(2)]], ["1 of 2 steps equal"]),
    "first difference": (
        [[batch(1), batch(2)]],
        [[batch(1), batch(2, loss=0.25), batch(3, loss=0.125)]],
        ["first at batch 2 of epoch 0 (rank 0)", "loss: 0.5 in the run, 0.25 in the replay"],
    ),
    "logged": ([LOGGED], [[batch(1), log(2, 0.5)]], ["1 step equals"]),
    "logged otherwise": (
        [LOGGED],
        [[batch(1), log(2, 0.75)]],
        ["first at values logged at step 1", "loss: 0.5 in the run, 0.75 in the replay"],
    ),
    "no order is known": ([[batch(1, order=None)]], [[batch(1)]], ["1 step equals"]),
}


@pytest.mark.parametrize("case", COMPARED)
def test_lines_of_the_same_moment_are_compared(case: str, tmp_path: Path, capsys: Capture) -> None:
    """Steps before the replay, after it, those without a line, and what is logged later at a place, don't count."""
    run, own, said = COMPARED[case]
    whole = [[{"event": "fit", "function": "fit", "pid": 1}, *lines] for lines in (*run, *own)]
    whole = [[{"fit": 1, "time": 0.0, **line} for line in lines] for lines in whole]
    for rank, lines in enumerate(whole[: len(run)]):
        for line in lines:
            append_line(tmp_path / ("run" + f".rank-{rank}" * (rank > 0)), line)
    start = {"exception": None, "ledger": str(tmp_path / "run")}
    status, text = replayed(capsys, "--until=9", start, [(REACHED, "")] * len(run), whole[len(run) :])
    assert (status, all(each in text for each in said)) == (0 if "equal" in said[0] else 1, True), text
