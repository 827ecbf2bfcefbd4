"""The history of a run, in a file and in a store: where it is kept, and that its errors never hurt the run."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path

import pytest

from lightning_faulttolerant.records.lines import parse_lines
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.run.history_file import LocalHistory, RemoteHistory, open_history
from tests.records.made import Story
from tests.runs import make_trainer

HERE = Script(os.getpid(), "a-token-of-some-length")


def hold() -> None:
    """Still hold the run's directory."""


@pytest.mark.parametrize("how", ["directory is gone", "is a directory", "disk is full"])
def test_history_that_cannot_be_written_is_announced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Whatever is wrong with the file, the fit continues, and one warning says what is missing."""
    if how == "is a directory":
        (tmp_path / "history.jsonl").mkdir()
    elif how == "disk is full":
        (tmp_path / "history.jsonl").symlink_to("/dev/full")
    directory = tmp_path / "gone" if how == "directory is gone" else tmp_path
    file = LocalHistory(str(directory))
    history = HistoryWriter(make_trainer([], tmp_path), file)
    with caplog.at_level(logging.WARNING):
        history.begin(HERE)
        due_at = history.due_at
        history.start(None, None)
        history.alive()
        history.end(None)
        file.close()
    assert due_at < float("inf")
    [record] = [each for each in caplog.records if each.name.startswith("lightning_faulttolerant")]
    assert record.levelno == logging.WARNING
    assert re.search("can't be written to.*training continues without", record.getMessage())


def test_object_holds_the_lines_of_all_processes() -> None:
    """An earlier process's lines stay before the lines of the next one; the end of the script is noted."""
    url = f"memory://{uuid.uuid4().hex}"
    for _ in range(2):
        file = open_history(url, check=hold)
        for line in Story().begin().start().end().lines:
            file.add(line)
        file.flush()
    file.close()
    lines = parse_lines(RemoteStore(url).read("history.jsonl") or b"")
    assert [line["event"] for line in lines] == ["begin", "start", "end"] * 2 + ["done"]
    RemoteHistory(f"{url}/none", check=hold).close()
    assert RemoteStore(f"{url}/none").read("history.jsonl") is None
