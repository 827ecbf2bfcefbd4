"""The history of a run, in a file and in a store: where it is kept, and that its errors never hurt the run."""

from __future__ import annotations

import logging
import os
import time
import uuid
from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.records.lines import Line, parse_lines, read_lines
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.position import BOUNDARY, TrainerPosition
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.run.history import HistoryWriter, reason_of
from lightning_faulttolerant.trainer.run.history_file import LocalHistory, RemoteHistory, open_history
from lightning_faulttolerant.trainer.signals import signal_reason, stopped_by
from tests.records.made import Story

HERE = Script(os.getpid(), "a-token-of-some-length")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Return a trainer that has done nothing."""
    return Trainer(logger=False, enable_checkpointing=False, default_root_dir=tmp_path, accelerator="cpu")


@pytest.fixture
def url() -> str:
    """Return a URL below which nothing exists."""
    return f"memory://{uuid.uuid4().hex}"


def hold() -> None:
    """Still hold the run's directory."""


def stored(url: str) -> list[Line]:
    """Return the lines in the store."""
    return parse_lines(RemoteStore(url).read("history.jsonl") or b"")


def events(lines: list[Line]) -> list[str]:
    """Return the kinds of the lines."""
    return [line["event"] for line in lines]


def message(caplog: pytest.LogCaptureFixture) -> str:
    """Return the only message that was logged."""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    return record.getMessage()


# The events of a fit.


def test_fit_tells_what_happens_once(trainer: Trainer, tmp_path: Path) -> None:
    """A fit begins, starts and ends once, however often these are reported; each line has its time and its fit."""
    history = HistoryWriter(trainer, open_history(str(tmp_path), check=hold), fit=3)
    position = TrainerPosition(where=BOUNDARY, epoch=1, batch=2, global_step=3)
    history.begin(HERE)
    for _ in range(2):
        history.start(None, None)
    history.autosave(None, "/runs/a.ckpt", position, seconds=0.5, taken=time.perf_counter() - 2, is_in_background=True)
    history.alive()
    for _ in range(2):
        history.end(None)
    lines = read_lines(tmp_path / "history.jsonl")
    assert events(lines) == ["begin", "start", "autosave", "alive", "end"]
    assert {line["fit"] for line in lines} == {3}
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert (lines[0]["process"], lines[0]["pid"]) == ("a-token-of-s", os.getpid())
    assert (lines[1]["continues"], lines[1]["resumed"], lines[1]["num_ranks"]) == (False, None, 1)
    saved = lines[2]
    assert (saved["name"], saved["epoch"], saved["batch"], saved["global_step"]) == ("a.ckpt", 1, 2, 3)
    assert (saved["seconds"], saved["behind"], saved["bytes"]) == (0.5, True, None)
    assert saved["taken"] <= saved["time"] - 2
    assert lines[4]["saved"] == {"epoch": 1, "batch": 2, "global_step": 3}
    assert history.due_at == float("inf")


@pytest.mark.parametrize(
    ("exception", "reason", "text"),
    [
        (None, "finished", ""),
        (stopped_by(signal_reason(15), "before batch 3"), "stopped by SIGTERM", "Stopped by SIGTERM before batch 3"),
        (TrainingStopped(75, "Stopped by the deadline before batch 3"), "stopped by the deadline", "Stopped by the"),
        (ValueError("of\nthe user"), "ValueError", "ValueError: of\nthe user"),
        (ValueError("\x1b[31mred\x1b[0m"), "ValueError", "ValueError: red"),
        (KeyboardInterrupt(), "KeyboardInterrupt", "KeyboardInterrupt: "),
        (ValueError("x" * 10_000), "ValueError", "ValueError: xxx"),
    ],
)
def test_end_has_a_reason(exception: BaseException | None, reason: str, text: str) -> None:
    """The reason is a few words; the text may be longer, up to a limit."""
    told = reason_of(exception)
    assert told[0] == reason
    assert told[1].startswith(text)
    assert len(told[1]) <= 300


# A file.


@pytest.mark.parametrize("how", ["directory is gone", "is a directory", "disk is full"])
def test_history_that_cannot_be_written_is_announced_once(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Whatever is wrong with the file, the fit continues, and one warning says what is missing."""
    if how == "is a directory":
        (tmp_path / "history.jsonl").mkdir()
    elif how == "disk is full":
        (tmp_path / "history.jsonl").symlink_to("/dev/full")
    directory = tmp_path / "gone" if how == "directory is gone" else tmp_path
    file = LocalHistory(str(directory))
    history = HistoryWriter(trainer, file)
    with caplog.at_level(logging.WARNING):
        history.begin(HERE)
        due_at = history.due_at
        history.start(None, None)
        history.alive()
        history.end(None)
        file.close()
    assert due_at < float("inf")
    assert "can't be written to" in message(caplog)
    assert "training continues without" in message(caplog)


# An object in a store.


def test_object_holds_the_lines_of_all_processes(url: str) -> None:
    """An earlier process's lines stay before the lines of the next one; the end of the script is noted."""
    for _ in range(2):
        file = open_history(url, check=hold)
        for line in Story().begin().start().end().lines:
            file.add(line)
        file.flush()
    file.close()
    assert events(stored(url)) == ["begin", "start", "end"] * 2 + ["done"]
    RemoteHistory(f"{url}/none", check=hold).close()
    assert stored(f"{url}/none") == []


BEGUN = {"event": "begin", "fit": 2}
AT_4 = {"event": "autosave", "fit": 2, "num_validated": 4}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([BEGUN, AT_4], 4),
        ([BEGUN, {"event": "alive", "fit": 2, "num_validated": 6}, AT_4, BEGUN], 6),
        ([BEGUN, AT_4, {"event": "end", "fit": 2, "num_validated": 4, "saved": {"num_validated": 4}}], None),
        ([BEGUN, AT_4, {"event": "end", "fit": 2, "num_validated": 7, "saved": {"num_validated": 4}}], 7),
        ([BEGUN, AT_4, {"event": "done"}], None),
        ([BEGUN, AT_4, {"event": "alive", "fit": 3, "num_validated": 9}], 4),
    ],
    ids=["killed", "killed again at its start", "stopped", "an exception", "another run", "another fit"],
)
def test_batches_before_a_kill(trainer: Trainer, tmp_path: Path, lines: list[Line], expected: int | None) -> None:
    """What is known to have run is the most that any process left, unless the last one saved where it ended."""
    file = LocalHistory(str(tmp_path))
    for line in lines:
        file.add(line)
    file.flush()
    assert HistoryWriter(trainer, file, fit=2, function="test").num_before_kill() == expected
