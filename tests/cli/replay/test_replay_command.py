"""Wrong usage of ``replay`` is reported before any script is started; of several ends, the decisive one is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_faulttolerant.cli import replay
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
from tests.cli.checkpoints import call

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ((), "no step is named: pass --from, --until, or --at-exception"),
        (("--until", "3", "--at-exception"), "--at-exception and --until can't be combined"),
        (("--from", "1:3", "--until", "1:2"), "--from batch 3 of epoch 1 is after --until batch 2 of epoch 1"),
        (("--until", "x"), "x is neither the number of a step, from 0, nor EPOCH:BATCH, such as 2:7"),
        (("--until", "1", "--fit", "0"), "0 is not a whole number of at least 1"),
        (("--until", "1", "--set", "lr=1"), "lr=1 is not KEY=VALUE, such as model.hparams.size=3"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    options: tuple[str, ...], problem: str, tmp_path: Path, capsys: Capture
) -> None:
    """The message says what is wrong, and the script is not started."""
    started = tmp_path / "started"
    found = call(capsys, "replay", *options, "--", sys.executable, "-c", f"open({str(started)!r}, 'w')")
    assert found.status == 2
    assert problem in found.err
    assert not started.exists()


@pytest.mark.parametrize("option", ["--dump", "--output"])
def test_a_directory_with_something_in_it_is_refused(option: str, tmp_path: Path, capsys: Capture) -> None:
    """Nothing is mixed with what another replay has written."""
    (tmp_path / "file").touch()
    found = call(capsys, "replay", "--until", "1", option, tmp_path, "--", sys.executable, "-c", "1")
    assert found.status == 2
    assert f"{tmp_path} is not empty" in found.err


def test_a_command_that_does_not_exist_is_refused(capsys: Capture) -> None:
    """The message names it."""
    found = call(capsys, "replay", "--until", "1", "--", "no-such-command")
    assert (found.status, found.err) == (2, "replay: no-such-command: no such command\n")


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
