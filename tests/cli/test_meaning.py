"""What a person means: nothing, the name of a run, a checkpoint, a directory above, or a URL."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.records.runs import FOLDER, Command, RegisteredRun, Registry
from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.run.history_file import text_of
from tests.cli.checkpoints import call, save_series
from tests.records.made import Story

Capture = pytest.CaptureFixture[str]
OLDER, NEWEST = (f"autosave-0000000{step}-epoch=0-batch={step}.ckpt" for step in (1, 2))
COMMANDS = {
    "list": ("list",),
    "report": ("report",),
    "inspect": ("inspect",),
    "verify": ("verify",),
    "prune": ("prune", "--dry-run", "--keep-last", 1),
}


def write_history(run: Path, *, is_finished: bool, now: float = 1_700_000_000.0) -> None:
    """Write the history of a run that was killed or has finished."""
    story = Story(now).begin(since=10).start().train(100, 10).autosave()
    story = story.end().wait(5).done() if is_finished else story
    run.mkdir(parents=True)
    (run / "history.jsonl").write_bytes(text_of(story.lines))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a project with a run that was killed, and one that has finished."""
    project = tmp_path / "one" / "two" / "project"
    for name in ("cut", "finished"):
        write_history(project / "fault_tolerance" / name, is_finished=name == "finished")
    save_series(project / "fault_tolerance" / "cut" / "fit-1", 2)
    monkeypatch.chdir(project)
    return project


def meanings(project: Path) -> dict[str, list[Any]]:
    """Return what a person may type for the run that was killed."""
    run = project / "fault_tolerance" / "cut"
    return {
        "nothing": [],
        "name": ["cut"],
        "run": [run],
        "fit": [run / "fit-1"],
        "checkpoint": [run / "fit-1" / NEWEST],
        "history": [run / "history.jsonl"],
        "dirpath": ["fault_tolerance"],
        "above": [project],
        "above that": [project.parent],
        "far above": [project.parent.parent.parent],
        "file URL": [f"file://{run}"],
        "file URL of a fit": [f"file://{run}/fit-1"],
        "file URL of a checkpoint": [f"file://{run}/fit-1/{NEWEST}"],
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("meaning", meanings(Path()))
def test_each_command_finds_what_is_meant(command: str, meaning: str, project: Path, capsys: Capture) -> None:
    """The newest autosave, or the run, is in the output."""
    found = call(capsys, *COMMANDS[command], *meanings(project)[meaning])
    assert (found.status, found.err) == (0, ""), found
    if (command, meaning) == ("list", "nothing"):  # the registry knows of no unfinished run
        assert "finished    2023-11-1" in found.out
    elif command == "report":
        assert "Run cut" in found.out or "Run finished" in found.out
        assert "Run cut" in found.out or meaning in ("nothing", "dirpath", "above", "above that", "far above")
    elif command == "prune":  # a checkpoint stands for its fit
        assert f"would delete {OLDER}" in found.out
    else:
        assert "autosave-0000000" in found.out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("inner", ["", "/cut", "/cut/history.jsonl", "/cut/fit-1", f"/cut/fit-1/{NEWEST}"])
def test_a_url(command: str, inner: str, capsys: Capture) -> None:
    """In a store, too, a directory far above, a run, a fit, and a checkpoint are found."""
    store = f"memory://{uuid.uuid4().hex}"
    url = f"{store}/one/two"
    story = Story(1_700_000_000.0).begin(since=10).start().train(100, 10).autosave()
    RemoteStore(f"{url}/cut").replace("history.jsonl", text_of(story.lines))
    save_series(f"{url}/cut/fit-1", 2)
    found = call(capsys, *COMMANDS[command], url + inner if inner else store)
    assert (found.status, found.err) == (0, ""), found
    expected = {"report": "Run cut", "prune": f"would delete {OLDER}"}
    assert expected.get(command, "autosave-0000000") in found.out


@pytest.fixture
def elsewhere(project: Path) -> Path:
    """Return the directory of a killed run that was started in the project and has another ``dirpath``."""
    run = project.parents[2] / "elsewhere" / "far"
    command = Command(script="train.py", words=("python", "train.py"), directory=str(project))
    registry = Registry(project / FOLDER)
    for directory in (run, project / "fault_tolerance" / "cut", run.parent / "deleted"):
        registry.add(RegisteredRun(run_id=directory.name, directory=str(directory), command=command, began=0.0))
    write_history(run, is_finished=False, now=1_800_000_000.0)
    save_series(run / "fit-1", 2)
    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_means_the_runs_of_this_directory_wherever_they_are(
    command: str, elsewhere: Path, capsys: Capture
) -> None:
    """A run with another ``dirpath`` is found next to those below this directory; each is found once."""
    found = call(capsys, *COMMANDS[command])
    assert (found.status, found.err) == (0, ""), found
    expected = {
        "list": [str(elsewhere), "fault_tolerance/cut", "report finished"],
        "report": [f"Run far\n{elsewhere}\n", "Other runs there: 2\n", "\n  cut "],
        "inspect": [f"{elsewhere}/fit-1/{NEWEST}\n", "Other runs: "],
        "verify": [f"{elsewhere}/fit-1/{NEWEST}: verified", f"./fault_tolerance/cut/fit-1/{NEWEST}: verified"],
        "prune": [f"{elsewhere}/fit-1: 1 kept, 1 would", "fault_tolerance/cut/fit-1: 1 kept, 1 would"],
    }
    assert [text for text in expected[command] if found.out.count(text) != 1] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_run_elsewhere_that_can_not_be_read_is_named(command: str, elsewhere: Path, capsys: Capture) -> None:
    """The others are found; the status is 2, unless the command is about one run."""
    entry = Registry(Path(FOLDER)).entries()[0]
    Registry(Path(FOLDER)).add(replace(entry, directory="nothing://bucket/run"))
    found = call(capsys, *COMMANDS[command])
    assert found.status == (0 if command in ("inspect", "report") else 2)
    assert "nothing://bucket/run can't be opened" in (found.out if command == "verify" else found.err)
    assert ("far" if command in ("list", "report") else "autosave-0000000") in found.out


def test_inspect_names_the_other_runs(elsewhere: Path, project: Path, capsys: Capture) -> None:
    """After the newest checkpoint of several runs, one line says what to type for another; JSON has a list."""
    cut = str(project / "fault_tolerance" / "cut")
    last = call(capsys, "inspect").lines[-1]
    assert last == f"Other runs: {cut}. To see one, type: lightning-faulttolerant inspect {cut}"
    assert json.loads(call(capsys, "inspect", "--json").out)["other_runs"] == [cut]
    for one in ("cut", "far", elsewhere / "fit-1", elsewhere / "fit-1" / NEWEST):
        found = call(capsys, "inspect", one)
        assert (found.status, "Other runs" in found.out) == (0, False)
        assert json.loads(call(capsys, "inspect", one, "--json").out)["other_runs"] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_memory_of_another_process_is_said_to_be_out_of_reach(command: str, capsys: Capture) -> None:
    """Nothing is found below ``memory://``, and one sentence says why."""
    url = f"memory://{uuid.uuid4().hex}/run/fit-1/{NEWEST}"
    found = call(capsys, *COMMANDS[command], url)
    assert found.status == {"inspect": 2, "prune": 0}.get(command, 1)
    [line] = [line for line in (found.out + found.err).splitlines() if url in line]
    assert line.removesuffix(".").endswith("; only the process that writes to memory:// can read it")


@pytest.mark.parametrize("command", COMMANDS)
def test_what_does_not_exist_is_named(command: str, project: Path, capsys: Capture) -> None:
    """With what was typed; for runs, the command that lists them."""
    found = call(capsys, *COMMANDS[command], "nothing")
    assert found.status == (1 if command == "verify" else 2)
    missing = "missing: " if command == "verify" else ""
    said = f'nothing: {missing}No such file or directory, and no run has this name; "list" shows the runs of this '
    assert said in found.out + found.err


def test_finished_fits_are_listed_as_finished(project: Path, capsys: Capture) -> None:
    """As text with the command that reports them, and as JSON."""
    assert "lightning-faulttolerant report finished" in call(capsys, "list").out
    [one] = json.loads(call(capsys, "list", "--json").out)["runs"]
    assert (one["run_id"], one["is_finished"]) == ("finished", True)
    assert one["directory"] == str(project / "fault_tolerance" / "finished")


def test_finished_runs_below_a_directory_are_listed_as_finished(project: Path, capsys: Capture) -> None:
    """What is left of a run with another ``dirpath`` is its history, so the directory must be named."""
    run = project.parent / "else where" / "done"
    write_history(run, is_finished=True)
    for place in (run, run.parent, run / "history.jsonl"):
        found = call(capsys, "list", place)
        assert (found.status, found.err) == (0, "")
        assert (found.lines[0], found.lines[2]) == ("done", f"  report      lightning-faulttolerant report '{run}'")
        shown = json.loads(call(capsys, "list", place, "--json").out)
        assert (shown["checkpoints"], [one["directory"] for one in shown["runs"]]) == ([], [str(run)])
    assert call(capsys, "report", run).lines[0] == "Run done"
    refused = call(capsys, "inspect", run).err
    assert refused.endswith(f'{run}: No checkpoints are there; "report" shows the history of the run\n')


def test_a_name_is_that_of_a_run_anywhere_below_this_directory(project: Path, capsys: Capture) -> None:
    """What `list` says to type must work; of two runs with one name, the directories are named."""
    runs = [project / folder / "fault_tolerance" / "logged" for folder in ("logs", "more")]
    write_history(runs[0], is_finished=True)
    assert "report      lightning-faulttolerant report logged" in call(capsys, "list").out
    assert call(capsys, "report", "logged").lines[:2] == ["Run logged", "./logs/fault_tolerance/logged"]
    write_history(runs[1], is_finished=True)
    found = call(capsys, "report", "logged")
    assert found.status == 2
    assert "There are 2 runs with the id logged" in found.err
    assert all(str(run.relative_to(project)) in found.err for run in runs)
