"""``report``: which run it finds, and what it reports."""

from __future__ import annotations

import json
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.cli.report import report_lines
from lightning_faulttolerant.cli.report_page import end_text, short_duration
from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.goodput import KINDS
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.run.history_file import shortened, text_of
from tests.cli.checkpoints import call, save_series
from tests.records.made import Story

Capture = pytest.CaptureFixture[str]


def killed_and_done(now: float = 1_700_000_000.0) -> Story:
    """Return a run that was killed, stopped, and finished."""
    story = Story(now).begin(since=10).wait(20).start()
    for _ in range(20):
        story.train(100, 10).autosave(seconds=0.5, num_bytes=1_000_000)
    story.train(60, 6).alive().wait(600).wait(10).begin(since=10).wait(20)
    story.start(resumed=5, name=story.newest, batch=200).train(1000, 100).autosave(seconds=2.5, num_bytes=1_000_000)
    story.end("stopped by SIGTERM").wait(30).begin().wait(20).start(resumed=5, name=story.newest, batch=300)
    return story.train(500, 50).autosave(seconds=1).end().wait(5).done()


def write(directory: Path, story: Story) -> Path:
    """Write the history of a run, and return its directory."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "history.jsonl").write_bytes(text_of(story.lines))
    return directory


def lines_of(story: Story, **options: Any) -> list[str]:
    """Return the text of a report."""
    report = report_of(history_of(story.lines), run_id="train-1", path="/runs/train-1", made=story.now, **options)
    assert report is not None
    return list(report_lines(report))


# The contents.


def test_report_tells_each_process(capsys: Capture, tmp_path: Path) -> None:
    """Each process has a row: how long it ran, from where to where it went, and why it ended."""
    found = call(capsys, "report", write(tmp_path / "train-1", killed_and_done()))
    assert (found.status, found.err) == (0, "")
    assert found.lines[0] == "Run train-1"
    assert found.lines[1] == str(tmp_path / "train-1")
    header = next(number for number, line in enumerate(found.lines) if line.startswith("#"))
    rows = [line.split() for line in found.lines[header : header + 4]]
    assert rows[0] == ["#", "STARTED", "LASTED", "FROM", "TO", "SAVES", "ENDED"]
    assert [row[-6:] for row in rows[1:]] == [
        ["35m", "00s", "start", "2:6", "20", "killed"],
        ["17m", "12s", "2:0", "3:0", "1", "SIGTERM"],
        ["8m", "41s", "3:0", "end", "1", "finished"],
    ]


@pytest.mark.parametrize(("damage", "said"), [(b"{\n", "1 line of"), (b'\n[1]\n\n{"a"', "2 lines of")])
def test_report_says_what_it_could_not_read(capsys: Capture, tmp_path: Path, damage: bytes, said: str) -> None:
    """Damaged lines are counted, wherever they are, in all forms of the report; empty lines are not."""
    path = write(tmp_path / "train-1", killed_and_done()) / "history.jsonl"
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(first + b"\n" + damage + b"\n" + rest)
    page = tmp_path / "page.html"
    found = call(capsys, "report", path, "--html", page)
    assert found.lines[2] == f"{said} the history could not be read, torn by a kill or damaged. Their"
    assert f"{said} the history could not be read" in page.read_text()
    assert json.loads(call(capsys, "report", path, "--json").out)["num_unread"] == int(said[0])
    whole = call(capsys, "report", write(tmp_path / "train-2", killed_and_done()))
    assert "could not be read" not in whole.out


def test_a_place_that_is_not_known_is_said_not_to_be() -> None:
    """An autosave with a line that lacks its place is named so."""
    story = Story(1_700_000_000.0).begin().start().train(10, 1).autosave(seconds=3, num_bytes=1000)
    for line in story.lines:
        line.pop("batch", None)
    assert "waited longest for one whose place is not known" in " ".join(" ".join(lines_of(story)).split())


def test_report_accounts_for_the_time() -> None:
    """Each kind of time has its line and its share, and the shares and the goodput are those of the account."""
    story = killed_and_done()
    [chapter] = history_of(story.lines).chapters
    lines = lines_of(story)
    first = next(number for number, line in enumerate(lines) if line.startswith("Where "))
    shares = {line[2:30].strip(): float(line.split("%")[0].split()[-1]) for line in lines[first + 1 : first + 9]}
    assert list(shares) == [
        "training that counted",
        "waiting for autosaves",
        "rest of the script",
        "start of the first process",
        "restoring",
        "work that was done again",
        "no process",
        "starts of later processes",
    ]
    assert sum(shares.values()) == pytest.approx(100, abs=0.4)
    total = chapter.done - chapter.processes[0].began if chapter.done else 0.0
    assert lines[first] == f"Where {short_duration(total)} went"
    assert shares["training that counted"] == pytest.approx(100 * 3500 / total, abs=0.05)
    up, lost = 3500 / (total - 630), short_duration(60 + 630 + 25 + 15)
    assert (
        lines[first + 9] == f"Goodput {3500 / total:.1%} ({up:.1%} while there was a process); lost to faults {lost}."
    )


def test_report_tells_of_the_slowest_save() -> None:
    """The report gives the number of autosaves, their size, and the one that training waited for longest."""
    text = " ".join(" ".join(lines_of(killed_and_done())).split())
    assert "22 autosaves, 21 MB in all." in text
    assert "Training waited longest for the one of epoch 3, batch 0 (1 MB): 2.5 s." in text


def test_report_fits_a_terminal() -> None:
    """No line is longer than 80 characters, however long durations and names are."""
    story = Story().wait(10**6).begin(since=10**6).wait(86_400).start()
    for _ in range(12):
        story.train(10**6, 123_456).autosave(seconds=12_345, num_bytes=10**12)
        story.wait(10**6).begin().start(resumed=100, name=story.newest, batch=story.batch)
        story.lines[-1]["resumed"]["not_exact"] = ["the workers' random generators are not carried over"] * 3
        story.train(5).end("AVeryLongNameOfAnExceptionOfTheUser")
        story.lines[-1]["text"] = "AVeryLongNameOfAnExceptionOfTheUser: " + "many words " * 20
    lines = lines_of(story)
    assert max(map(len, lines)) <= 80
    assert any("did NOT continue exactly: the workers'" in line for line in lines)
    assert any(line.startswith("Process 2: AVeryLongName") for line in lines)


def test_notes_of_resumes_come_last_each_once() -> None:
    """What the resumes have noted stands at the end, each note once, and at most five of them."""
    story = Story().begin().start().train(1, 9).autosave()
    for number in (1, 2):
        story.begin().start(resumed=1, name=story.newest, batch=story.batch)
        story.lines[-1]["resumed"]["notes"] = [f"note {each}" for each in range(3 * number)]
        story.train(5)
    lines = lines_of(story.end().done())
    assert lines[-6:] == [*(f"Note: note {each}" for each in range(5)), "1 more line of notes: --json shows all."]


def test_fits_of_a_script_have_rows_of_their_own() -> None:
    """In a script with several fits, each fit is a row, with its number."""
    story = Story().begin().start().train(9, 9).end().begin(same=True, fit=2).start().train(9, 9).end().done()
    rows = [line.split() for line in lines_of(story) if line.startswith(("#", "1"))]
    assert rows[0][:2] == ["#", "FIT"]
    assert [row[:2] for row in rows[1:]] == [["1", "1"], ["1", "2"]]


def test_hundreds_of_restarts_are_shortened() -> None:
    """Of very many processes, the first and the last are shown."""
    story = Story().begin().start().autosave()
    for _ in range(500):
        story.train(9, 9).autosave(seconds=1).wait(1).begin().start(resumed=1, name=story.newest, batch=story.batch)
    lines = lines_of(story)
    assert "... 461 more, --json shows all ..." in lines
    assert len(lines) < 70
    assert any(line.startswith("501  ") for line in lines)


def test_last_chapter_is_shown_or_all(capsys: Capture, tmp_path: Path) -> None:
    """A run that was started again after its end shows its last chapter, and ``--all`` shows all of them."""
    story = killed_and_done()
    story.wait(100).begin().start().train(77, 7).end().done()
    directory = write(tmp_path, story)
    found = call(capsys, "report", directory)
    assert "Chapter 2 of 2 (--all shows the 1 chapter before it)" in found.lines
    assert [line.split()[0] for line in found.lines if line[:1].isdecimal()] == ["1"]
    found = call(capsys, "report", directory, "--all")
    assert [line for line in found.lines if line.startswith("Chapter")] == ["Chapter 1 of 2", "Chapter 2 of 2"]


def test_forgotten_processes_are_said() -> None:
    """If the history was shortened by whole processes, the report says so."""
    story = Story()
    story.lines.append({"event": "shortened", "number": 17, "since": 1.0, "time": 2.0})
    story.begin().start().train(3).end()
    assert "nothing is known of the first 17 processes" in " ".join(lines_of(story))


def test_what_a_terminal_would_obey_is_escaped(capsys: Capture, tmp_path: Path) -> None:
    """No text of the file, and no name of a directory, can move the cursor."""
    story = with_a_test().begin().start().train(3).end("Error")
    story.lines[-1]["text"] = "Error"
    story.lines = [_spoilt(line) for line in story.lines]
    found = call(capsys, "report", "--all", write(tmp_path / "\x1b[31mrun", story))
    assert "\\x1b[31m" in found.out
    assert all(text.isprintable() for text in found.lines)


def _spoilt(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item if key == "event" else _spoilt(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spoilt(item) for item in value]
    return f"{value}\x1b[31m\x07" if isinstance(value, str) else value


@pytest.mark.parametrize(("age", "text"), [(20.0, "may be running"), (200.0, "killed")])
def test_run_that_may_be_running_is_called_so(age: float, text: str) -> None:
    """Without an end, the last process may be running if its last sign of life is fresh; earlier ones were killed."""
    story = Story().begin().start().train(5)
    story.alive()
    [fit] = history_of(story.lines).chapters[0].fits
    assert end_text(fit, is_last=True, made=story.now + age) == text
    assert end_text(fit, is_last=False, made=story.now) == "killed"


# Which run.


def test_newest_of_several_runs_is_reported(capsys: Capture, tmp_path: Path) -> None:
    """In a ``dirpath`` with several runs, the one that was alive last is reported, and the others are listed."""
    write(tmp_path / "old", killed_and_done(1_600_000_000.0))
    write(tmp_path / "new", killed_and_done(1_700_000_000.0))
    (tmp_path / "none").mkdir()
    found = call(capsys, "report", tmp_path)
    assert (found.status, found.lines[0]) == (0, "Run new")
    assert "Other runs there: 1" in found.lines
    assert found.lines[-1].split()[0] == "old"


@pytest.mark.parametrize("below", [".", "fault_tolerance", "fault_tolerance/run", "fault_tolerance/run/history.jsonl"])
def test_run_is_found_from_above(capsys: Capture, tmp_path: Path, below: str) -> None:
    """``default_root_dir``, ``dirpath``, the run's directory, and the file itself lead to the run."""
    write(tmp_path / "fault_tolerance" / "run", killed_and_done())
    found = call(capsys, "report", tmp_path / below)
    assert (found.status, found.lines[0]) == (0, "Run run")


def test_run_below_a_url_is_found(capsys: Capture) -> None:
    """A run in a store is reported by its URL, and by the parent URL."""
    url = f"memory://{uuid.uuid4().hex}"
    RemoteStore(f"{url}/run").replace("history.jsonl", text_of(killed_and_done().lines))
    for place in (url, f"{url}/run", f"{url}/run/history.jsonl"):
        found = call(capsys, "report", place)
        assert (found.status, found.lines[:2]) == (0, ["Run run", f"{url}/run"])
    assert call(capsys, "report", f"memory://{uuid.uuid4().hex}").status == 1


def test_nothing_to_report(capsys: Capture, tmp_path: Path) -> None:
    """A directory without a history is distinguished from a missing one."""
    save_series(tmp_path / "run" / "fit-1", 1)
    found = call(capsys, "report", tmp_path)
    assert (found.status, found.out) == (1, "")
    assert "No history of a run was found in" in found.err
    found = call(capsys, "report", tmp_path / "missing")
    assert (found.status, "No such file or directory" in found.err) == (2, True)


def test_other_commands_are_not_confused(capsys: Capture, tmp_path: Path) -> None:
    """``list``, ``verify``, and ``prune`` consider only checkpoints, and leave the history alone."""
    directory = write(tmp_path / "run", killed_and_done())
    save_series(directory / "fit-1", 3)
    assert "history" not in call(capsys, "list", tmp_path).out
    assert call(capsys, "verify", tmp_path).status == 0
    assert call(capsys, "prune", tmp_path, "--keep-last=1", "--damaged", "--superseded").status == 0
    assert (directory / "history.jsonl").read_bytes() == text_of(killed_and_done().lines)


# In other forms.


def test_json_tells_all(capsys: Capture, tmp_path: Path) -> None:
    """``--json`` gives processes, fits, autosaves, the account, and its segments."""
    write(tmp_path / "other", killed_and_done(1_600_000_000.0))
    found = call(capsys, "report", write(tmp_path / "run", killed_and_done()).parent, "--json")
    told = json.loads(found.out)
    assert (told["run_id"], told["num_chapters"], told["other_runs"]) == ("run", 1, ["other"])
    [chapter] = told["chapters"]
    assert [process["fits"][0]["reason"] for process in chapter["processes"]] == [
        None,
        "stopped by SIGTERM",
        "finished",
    ]
    assert len(chapter["processes"][0]["fits"][0]["autosaves"]) == 20
    account = chapter["account"]
    assert account["total"] == pytest.approx(sum(account[kind] for kind in KINDS))
    lengths = [segment["ended"] - segment["began"] for segment in chapter["segments"]]
    assert sum(lengths) == pytest.approx(account["total"])
    assert told["made"] == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00049, "0 s"), (0.9994, "999 ms"), (0.9996, "1.0 s"), (59.4, "59.4 s"), (59.7, "60 s"), (61, "1m 01s"),
     (3599.6, "1h 00m"), (47.9 * 3600, "47h 54m"), (48 * 3600, "2d 00h"), (400 * 86400, "400d 00h")],
)  # fmt: skip
def test_lengths_of_time_read_well(seconds: float, text: str) -> None:
    """A length has at most two units, is rounded, and never has sixty of a smaller one."""
    assert short_duration(seconds) == text


def with_a_test() -> Story:
    """Return a script that validates, is killed in a validation run and in its test, and ends."""
    story = Story(1_700_000_000.0).begin().start().train(100, 10).validate(50, 50, ends=False).autosave().alive()
    story.validate(7, 7, ends=False).alive()
    story.begin().start(resumed=1, name=story.newest, batch=10, evaluated=50).validate(50, 50, first=50).autosave()
    fit = story.end().newest
    story.begin(same=True, fit=2, function="test").start(evaluated=0).validate(30, 30).autosave().validate(5, 5).alive()
    test = story.newest
    story.begin().start(resumed=1, name=fit, batch=10).end()
    story.begin(same=True, fit=2, function="test").start(resumed=1, name=test, batch=10, evaluated=30)
    return story.validate(70, 70).autosave(seconds=9).end().done()


def test_evaluations_have_rows_and_words_of_their_own() -> None:
    """Each function has a row with its batches, and what was continued is named."""
    lines = lines_of(with_a_test())
    header = next(number for number, line in enumerate(lines) if line.startswith("#"))
    rows = [line.split() for line in lines[header + 1 : header + 6]]
    assert [(row[0], row[1], row[-4], row[-3], row[-1]) for row in rows] == [
        ("1", "fit-1", "start", "0:10:57", "killed"),
        ("2", "fit-1", "0:10:50", "end", "finished"),
        ("2", "test-2", "start", "35", "killed"),
        ("3", "fit-1", "0:10", "end", "finished"),
        ("3", "test-2", "30", "end", "finished"),
    ]
    text = " ".join(" ".join(lines).split())
    for expected in (
        "A third number is the batch of a validation run. In evaluations, they are batches.",
        "1 validation run inside fits: 107 batches in 1m 47s.",
        "Process 2 continued before batch 50 of the validation run after batch 10 of epoch 0: at least 7 batches of",
        "Process 3 continued test-2 before batch 30: at least 5 batches of evaluation ran again.",
        "Training and evaluation waited longest for the one of test-2, batch 100 (100 B): 9.0 s.",
    ):
        assert expected in text
    assert max(map(len, lines)) <= 80


def test_time_of_validation_runs_is_without_waits_for_autosaves() -> None:
    """The time that the report gives for validation runs has no waits in it, also after the file was shortened."""
    story = Story().begin().start()
    for _ in range(3):
        story.train(10).validate(6, ends=False).autosave(seconds=4).validate(6)
    story.end().done()
    text = "3 validation runs inside fits: 6 batches in 36.0 s."
    assert text in lines_of(story)
    full, story.lines = story.lines, shortened(story.lines, max_bytes=10**9, num_kept=0)
    assert len(story.lines) < len(full)
    assert text in lines_of(story)


def test_goodput_counts_evaluation_but_not_what_ran_again() -> None:
    """Training and evaluation are useful; batches that ran again are lost to faults."""
    text = " ".join(" ".join(lines_of(with_a_test())).split())
    assert "training that counted 1m 40s" in text
    assert "evaluation that counted 3m 20s" in text
    assert "work that was done again 12.0 s" in text
    assert f"Goodput {300 / 321:.1%}; lost to faults 12.0 s." in text


def test_json_tells_evaluations(capsys: Capture, tmp_path: Path) -> None:
    """``--json`` has the function and the validation runs of each fit, and what was continued."""
    [chapter] = json.loads(call(capsys, "report", write(tmp_path / "run", with_a_test()), "--json").out)["chapters"]
    fits = [fit for process in chapter["processes"] for fit in process["fits"]]
    assert [fit["function"] for fit in fits] == ["fit", "fit", "test", "fit", "test"]
    assert [run["is_over"] for fit in fits for run in fit["validations"]] == [False, True]
    assert [(each["process"], each["fit"], each["num_again"]) for each in chapter["continued"]] == [
        (1, 1, 7),
        (2, 2, 5),
    ]
    assert chapter["account"]["evaluation"] == 200
