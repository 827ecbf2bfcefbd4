"""Wrong usage of ``replay`` is reported before any script is started; of several ends, the decisive one is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli import replay
from lightning_faulttolerant.cli.replay import Compared, compare
from lightning_faulttolerant.records.lines import append_line
from lightning_faulttolerant.records.requests import (
    LEFT,
    RAISED,
    REACHED,
    ReplayOutcome,
    ReplayRequest,
    ReplayStart,
    StepPlace,
    write_outcome,
    write_start,
)
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
    found = call(capsys, "replay", "--until", "1", "--output", tmp_path, "--", sys.executable, "-c", "1")
    assert found.status == 2
    assert "fit 1 was not replayed: the script has no such fit." in found.err
    failed = call(capsys, "replay", "--until", "1", "--", sys.executable, "-c", "exit(3)")
    assert "fit 1 was not replayed: the script ended with exit code 3." in failed.err
    assert list(tmp_path.iterdir()) == []


LOST = "RanksLostError: rank 1 is lost"
ERROR = "ValueError: no"


@pytest.mark.parametrize(
    ("ends", "exception", "end", "status"),
    [
        ([(RAISED, LOST), (RAISED, ERROR)], ERROR, "raised in batch 2 of epoch 0: ValueError: no", 0),
        ([(RAISED, LOST), (RAISED, ERROR)], LOST, "raised in batch 2 of epoch 0: ValueError: no", 0),
        ([(RAISED, "RuntimeError: closed"), (RAISED, ERROR)], ERROR, "raised in batch 2 of epoch 0: ValueError: no", 0),
        ([(RAISED, LOST), (RAISED, ERROR)], "TypeError: no", "raised in batch 2 of epoch 0: ValueError: no", 1),
        ([(RAISED, LOST), (REACHED, "")], ERROR, "raised in batch 1 of epoch 0: RanksLostError: rank 1 is lost", 1),
        ([(LEFT, ""), (RAISED, LOST)], ERROR, "left in batch 1 of epoch 0, by the debugger", 0),
        ([(LEFT, ""), (RAISED, LOST)], None, "left in batch 1 of epoch 0, by the debugger", 0),
        ([(REACHED, ""), (RAISED, ERROR)], None, "raised in batch 2 of epoch 0: ValueError: no", 2),
    ],
)
def test_the_rank_that_ended_the_replay_decides(
    ends: list[tuple[str, str]], exception: str | None, end: str, status: int, tmp_path: Path, capsys: Capture
) -> None:
    """A rank that only lost another one hides neither the exception of that rank nor that the user left."""
    until = None if exception else StepPlace(number=9)
    request = ReplayRequest(directory=str(tmp_path), until=until)
    write_start(request, ReplayStart(exception=exception))
    for rank, (word, text) in enumerate(ends):
        write_outcome(request, rank, ReplayOutcome(word=word, place=StepPlace(epoch=0, batch=rank + 1), text=text))
    assert replay._result(request, 0) == status
    assert end in capsys.readouterr().out


# The comparison with the run.


def _ledger(path: Path, *lines: dict[str, Any]) -> str:
    begin = {"event": "fit", "fit": 1, "function": "fit", "pid": 1}
    for line in (begin, *lines):
        append_line(path, {"fit": 1, "time": 0.0, **line})
    return str(path)


def _batch(batch: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"event": "batch", "epoch": 0, "batch": batch, "order": "o", "loss": loss.hex(), **more}


def _log(batch: int, value: float, *, epoch_end: bool = False) -> dict[str, Any]:
    place = {"epoch": 0, "batch": batch, "step": 1, "validating": False, "logger": None}
    return {"event": "log", **place, "metrics": {"loss": value.hex()}, "epoch_end": epoch_end}


def _compared(tmp_path: Path, run: list[dict[str, Any]], replay: list[dict[str, Any]]) -> Compared:
    original, own = _ledger(tmp_path / "run", *run), _ledger(tmp_path / "replay", *replay)
    return compare(original, own, fit=1, ranks=[0])


LOGGED = [_batch(1), _log(2, 0.5), _log(2, 0.75, epoch_end=True)]


@pytest.mark.parametrize(
    ("run", "own", "num_steps", "difference"),
    [
        ([_batch(0), _batch(1), _batch(3)], [_batch(1), _batch(2)], 1, None),
        (
            [_batch(1), _batch(2)],
            [_batch(1), _batch(2, loss=0.25), _batch(3, loss=0.125)],
            None,
            ("batch 2 of epoch 0", "loss", "0.5", "0.25"),
        ),
        (LOGGED, [_batch(1), _log(2, 0.5)], 1, None),
        (LOGGED, [_batch(1), _log(2, 0.75)], None, ("values logged at step 1", "loss", "0.5", "0.75")),
        ([_batch(1, order=None)], [_batch(1)], 1, None),
    ],
    ids=["steps of both", "first difference", "logged", "logged otherwise", "no order is known"],
)
def test_lines_of_the_same_moment_are_compared(
    run: list[Any], own: list[Any], num_steps: int | None, difference: Any, tmp_path: Path
) -> None:
    """Steps before the replay, after it, those without a line, and what is logged later at a place, don't count."""
    found = _compared(tmp_path, run, own)
    if difference is None:
        assert found == Compared(num_steps=num_steps or 0)
        return
    assert found.difference is not None
    [value] = found.difference.values
    assert (found.difference.place, value.name, value.expected, value.found) == difference


def test_each_rank_is_compared_with_its_own_ledger(tmp_path: Path) -> None:
    """A difference on the second rank alone is found."""
    original, own = _ledger(tmp_path / "run", _batch(1)), _ledger(tmp_path / "replay", _batch(1))
    _ledger(tmp_path / "run.rank-1", _batch(1))
    _ledger(tmp_path / "replay.rank-1", _batch(1, loss=0.25))
    found = compare(original, own, fit=1, ranks=[0, 1])
    assert found.difference is not None
    assert found.difference.rank == 1
