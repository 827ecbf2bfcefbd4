"""The history of a run, in a file and in a store: where it is kept, and that its errors never hurt the run."""

from __future__ import annotations

import logging
import os
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.records.lines import parse_lines
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.run.history_file import LocalHistory, RemoteHistory, open_history
from tests.records.made import Story
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


def test_object_holds_the_lines_of_all_processes() -> None:
    """An earlier process's lines stay before the lines of the next one; the end of the script is noted."""
    url = f"memory://{uuid.uuid4().hex}"
    for _ in range(2):
        file = open_history(url, check=lambda: None)
        for line in Story().begin().start().end().lines:
            file.add(line)
        file.flush()
    file.close()
    lines = parse_lines(RemoteStore(url).read("history.jsonl") or b"")
    assert [line["event"] for line in lines] == ["begin", "start", "end"] * 2 + ["done"]
    RemoteHistory(f"{url}/none", check=lambda: None).close()
    assert RemoteStore(f"{url}/none").read("history.jsonl") is None


BEGUN, AT_4 = {"event": "begin", "fit": 2}, {"event": "autosave", "fit": 2, "num_validated": 4}
END_AT_4 = {"event": "end", "fit": 2, "num_validated": 4, "saved": {"num_validated": 4}}
BEFORE_KILLS: list[tuple[list[dict[str, Any]], int | None]] = [
    ([AT_4], 4),
    ([{"event": "alive", "fit": 2, "num_validated": 6}, AT_4, BEGUN], 6),
    ([AT_4, END_AT_4], None),
    ([AT_4, {**END_AT_4, "num_validated": 7}], 7),  # by an exception
    ([AT_4, {"event": "done"}], None),
    ([AT_4, {"event": "alive", "fit": 3, "num_validated": 9}], 4),
]


@pytest.mark.parametrize(("lines", "expected"), BEFORE_KILLS)
def test_batches_before_a_kill(tmp_path: Path, lines: list[dict[str, Any]], expected: int | None) -> None:
    """What is known to have run is the most that any process left, unless the last one saved where it ended."""
    file = LocalHistory(str(tmp_path))
    for line in (BEGUN, *lines):
        file.add(line)
    file.flush()
    assert HistoryWriter(make_trainer([], tmp_path), file, fit=2, function="test").num_before_kill() == expected
