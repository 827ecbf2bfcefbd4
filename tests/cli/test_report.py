"""``report``: which run it finds, and what it reports as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.report import report_lines
from lightning_faulttolerant.cli.report_page import short_duration
from lightning_faulttolerant.cli.text import duration_text, plural, share_text, short_text, value_text
from lightning_faulttolerant.records.goodput import KINDS
from lightning_faulttolerant.trainer.run.history_file import text_of
from tests.cli.checkpoints import call, save_series, told
from tests.cli.stories import BEGAN, killed_and_done, reported, with_a_test
from tests.records.made import Story

Capture = pytest.CaptureFixture[str]


def write(directory: Path, story: Story) -> Path:
    """Write the history of a run, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "history.jsonl").write_bytes(text_of(story.lines))
    return directory


def with_long_words() -> Story:
    """Return a run with long durations, names, and texts."""
    story = Story().wait(10**6).begin(since=10**6).wait(86_400).start()
    for _ in range(12):
        story.train(10**6, 123_456).autosave(seconds=12_345, num_bytes=10**12)
        story.wait(10**6).begin().start(resumed=100, name=story.newest, batch=story.batch)
        story.lines[-1]["resumed"]["not_exact"] = ["the workers' random generators are not carried over"] * 3
        story.train(5).end("AVeryLongNameOfAnExceptionOfTheUser")
        story.lines[-1]["text"] = "AVeryLongNameOfAnExceptionOfTheUser: " + "many words " * 20
    return story


def with_notes() -> Story:
    """Return a run whose resumes have noted the same and more."""
    story = Story().begin().start().train(1, 9).autosave()
    for number in (1, 2):
        story.begin().start(resumed=1, name=story.newest, batch=story.batch)
        story.lines[-1]["resumed"]["notes"] = [f"note {each}" for each in range(3 * number)]
        story.train(5)
    return story.end().done()


def forgotten() -> Story:
    """Return a run whose history was shortened by whole processes, and then runs two fits."""
    story = Story()
    story.lines.append({"event": "shortened", "number": 17, "since": 1.0, "time": 2.0})
    story.begin().start().train(9, 9).end()
    return story.begin(same=True, fit=2).start().train(9, 9).end().done()


STORIES: dict[str, Callable[[], Story]] = {
    "killed and done": killed_and_done,
    "with a test": with_a_test,
    "with long words": with_long_words,
    "with notes": with_notes,
    "forgotten": forgotten,
    "begun": lambda: Story(BEGAN).begin().start().train(5).alive(),  # it may be running
    "killed": lambda: Story(BEGAN).begin().start().train(5).alive(),
}


@pytest.mark.parametrize("name", STORIES)
def test_what_a_report_says(name: str, snapshot: SnapshotAssertion) -> None:
    """Each kind of history has a report whose text is known, and that a terminal can show."""
    story = STORIES[name]()
    lines = list(report_lines(reported(story, made=story.now + (200 if name == "killed" else 20))))
    assert max(map(len, lines)) <= 80
    assert "\n".join(lines) == snapshot


@pytest.mark.parametrize(("damage", "num_unread"), [(b"{\n", 1), (b'\n[1]\n\n{"a"', 2)])
def test_a_report_says_what_it_could_not_read(capsys: Capture, tmp_path: Path, damage: bytes, num_unread: int) -> None:
    """Damaged lines are counted, wherever they are; empty lines are not."""
    path = write(tmp_path / "train-1", killed_and_done()) / "history.jsonl"
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(first + b"\n" + damage + b"\n" + rest)
    said = f"{num_unread} line{'s' * (num_unread > 1)} of the history could not be read"
    assert said in call(capsys, "report", path, "--html", tmp_path / "page.html").out
    assert said in (tmp_path / "page.html").read_text()
    assert json.loads(call(capsys, "report", path, "--json").out)["num_unread"] == num_unread


def test_which_run_is_reported(capsys: Capture, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Of several runs, the one that was alive last, and its last chapter; nothing is distinguished from missing."""
    again = killed_and_done(1_600_000_000.0)
    again.wait(100).begin().start().train(77, 7).end().done()
    write(tmp_path / "fault_tolerance" / "old", again)
    write(tmp_path / "fault_tolerance" / "new", killed_and_done())
    save_series(tmp_path / "none" / "fit-1", 1)
    old = tmp_path / "fault_tolerance" / "old"
    calls = [[tmp_path], [old / "history.jsonl"], [old, "--all"], [tmp_path / "none"], [tmp_path / "missing"]]
    found = [call(capsys, "report", *words) for words in calls]
    assert [each.status for each in found] == [0, 0, 0, 1, 2]
    assert "\n\n".join(told(each, DIR=tmp_path) for each in found) == snapshot


def test_what_a_terminal_would_obey_is_escaped(capsys: Capture, tmp_path: Path) -> None:
    """No text of the file, and no name of a directory, can move the cursor."""

    def spoilt(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: item if key == "event" else spoilt(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoilt(item) for item in value]
        return f"{value}\x1b[31m\x07" if isinstance(value, str) else value

    story = with_a_test().begin().start().train(3).end("Error")
    story.lines = [spoilt(line) for line in story.lines]
    found = call(capsys, "report", "--all", write(tmp_path / "\x1b[31mrun", story))
    assert "\\x1b[31m" in found.out
    assert all(text.isprintable() for text in found.lines)


def test_json_tells_all(capsys: Capture, tmp_path: Path) -> None:
    """``--json`` gives processes, fits, autosaves, evaluations, the account, and its segments."""
    write(tmp_path / "other", killed_and_done(1_600_000_000.0))
    shown = json.loads(call(capsys, "report", write(tmp_path / "run", killed_and_done()).parent, "--json").out)
    assert (shown["run_id"], shown["num_chapters"], shown["other_runs"]) == ("run", 1, ["other"])
    [chapter] = shown["chapters"]
    reasons = [process["fits"][0]["reason"] for process in chapter["processes"]]
    assert reasons == [None, "stopped by SIGTERM", "finished"]
    assert len(chapter["processes"][0]["fits"][0]["autosaves"]) == 20
    account = chapter["account"]
    assert account["training"] == 3500
    assert account["total"] == pytest.approx(sum(account[kind] for kind in KINDS))


NUMBERS = [
    (short_duration, {0.9996: "1.0 s", 59.7: "60 s", 61: "1m 01s", 3599.6: "1h 00m", 48 * 3600: "2d 00h"}),
    (duration_text, {0: "0 s", 0.0042: "4.2 ms", 0.9996: "1.0 s", 9.96: "10 s", 59.7: "1 min", 3571: "59 min 31 s"}),
    (duration_text, {86399: "24 h", 9e5: "10 d 10 h", -90: "-1 min 30 s", float("nan"): "?"}),
    (share_text, {1: "100 %", 0.99996: "99.9 %", 0.9423: "94.2 %", 0.001: "0.1 %", 1e-9: "< 0.1 %", 0: "0 %"}),
    (lambda value: short_text(value, step=0.25), {0: "0", 0.25: "0.25", 0.5: "0.50", 1: "1.00"}),
    (lambda value: short_text(value, step=5000), {5000: "5,000", 15000: "15,000"}),
    (lambda value: short_text(value, step=50000), {100000: "100 k", 2.5e6: "2.50 M"}),
    (lambda value: plural(value, "batch", "batches"), {0: "0 batches", 1: "1 batch", 1200: "1,200 batches"}),
    (value_text, {0.1 + 0.2: "0.3"}),
]


@pytest.mark.parametrize(("function", "texts"), NUMBERS)
def test_numbers_read_well(function: Callable[[float], str], texts: dict[float, str]) -> None:
    """A number has few digits and at most two units, also if rounding carries; a share is never better than it is."""
    assert {value: function(value) for value in texts} == texts
