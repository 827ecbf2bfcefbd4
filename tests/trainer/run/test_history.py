"""Errors of the history never hurt the run."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path

import pytest

from lightning_faulttolerant.records.lines import parse_lines
from lightning_faulttolerant.storage.store import open_store
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.run.history_file import LocalHistory, RemoteHistory
from tests.runs import make_trainer


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
        history.begin(Script(os.getpid(), "a-token-of-some-length"))
        due_at = history.due_at
        history.start(None, None)
        history.alive()
        history.end(None)
        file.close()
    assert due_at < float("inf")
    [record] = [each for each in caplog.records if each.name.startswith("lightning_faulttolerant")]
    assert record.levelno == logging.WARNING
    assert re.search("can't be written to.*training continues without", record.getMessage())


def test_history_in_a_store_has_all_lines() -> None:
    """Each line is kept, but for a sign of life that another one follows."""
    url = f"memory://{uuid.uuid4().hex}"
    file = RemoteHistory(url, check=lambda: None)
    for event in ("begin", "start", "alive", "alive", "end"):
        file.add({"event": event})
    file.close()
    lines = parse_lines(open_store(url).read("history.jsonl") or b"")
    assert [line["event"] for line in lines] == ["begin", "start", "alive", "end", "done"]
