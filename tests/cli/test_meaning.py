"""What a person means: nothing, the name of a run, a checkpoint, a directory above, or a URL."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.records.runs import FOLDER, Command, RegisteredRun, Registry
from lightning_faulttolerant.storage.store import open_store
from lightning_faulttolerant.trainer.run.history_file import text_of
from tests.cli.checkpoints import call, save_series, told
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
# In the output of a command that has found the run.
FOUND = {"report": "Run cut", "prune": f"would delete {OLDER}"}


def write_history(run: Path | str, *, is_finished: bool, now: float = 1_700_000_000.0) -> None:
    """Write the history of a run that was killed or has finished."""
    story = Story(now).begin(since=10).start().train(100, 10).autosave()
    story = story.end().wait(5).done() if is_finished else story
    with open_store(str(run)).writer("history.jsonl") as file:
        file.write(text_of(story.lines))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a project with a run that was killed, and one that has finished."""
    project = tmp_path / "one" / "two" / "project"
    for name in ("cut", "finished"):
        write_history(project / "fault_tolerance" / name, is_finished=name == "finished")
    save_series(project / "fault_tolerance" / "cut" / "fit-1", 2)
    monkeypatch.chdir(project)
    return project


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_finds_what_is_meant(command: str, project: Path, capsys: Capture) -> None:
    """The newest autosave, or the run, is in the output: from a name, a directory above, a file of it, or a URL."""
    run = project / "fault_tolerance" / "cut"
    words = ["cut", run, run / "fit-1", run / "fit-1" / NEWEST, run / "history.jsonl", f"file://{run}/fit-1/{NEWEST}"]
    for word in (*words, "fault_tolerance", project.parents[2]):
        found = call(capsys, *COMMANDS[command], word)
        assert (found.status, found.err) == (0, ""), word
        # Of several runs, the one that was alive last is reported.
        assert FOUND.get(command, "autosave-0000000").replace("cut", "cut" if word in words else "") in found.out, word


@pytest.mark.parametrize("command", COMMANDS)
def test_a_url(command: str, capsys: Capture) -> None:
    """In a store, too, a directory far above, a run, a fit, and a checkpoint are found; memory is out of reach."""
    store = f"memory://{uuid.uuid4().hex}"
    url = f"{store}/one/two"
    write_history(f"{url}/cut", is_finished=False)
    save_series(f"{url}/cut/fit-1", 2)
    for place in (store, f"{url}/cut/history.jsonl", f"{url}/cut/fit-1/{NEWEST}"):
        found = call(capsys, *COMMANDS[command], place)
        assert (found.status, found.err) == (0, ""), found
        assert FOUND.get(command, "autosave-0000000") in found.out
    place = f"memory://{uuid.uuid4().hex}/run/fit-1/{NEWEST}"
    found = call(capsys, *COMMANDS[command], place)
    assert found.status == {"inspect": 2, "prune": 0}.get(command, 1)
    [line] = [line for line in (found.out + found.err).splitlines() if place in line]
    assert line.removesuffix(".").endswith("; only the process that writes to memory:// can read it")


@pytest.fixture
def elsewhere(project: Path) -> Path:
    """Return the directory of a killed run that was started in the project and has another ``dirpath``."""
    run = project.parents[2] / "elsewhere" / "far"
    command = Command(script="train.py", words=("python", "train.py"), directory=str(project))
    registry = Registry(project / FOLDER)
    for i, directory in enumerate((project / "fault_tolerance" / "cut", run, run.parent / "deleted")):
        registry.add(RegisteredRun(run_id=directory.name, directory=str(directory), command=command, began=float(i)))
    write_history(run, is_finished=False, now=1_800_000_000.0)
    save_series(run / "fit-1", 2)
    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_means_the_runs_of_this_directory_wherever_they_are(
    command: str, elsewhere: Path, project: Path, capsys: Capture, snapshot: SnapshotAssertion
) -> None:
    """Each run is found once, also one elsewhere; one that can't be read is named, and so is what does not exist."""
    found = [call(capsys, *COMMANDS[command])]
    entry = Registry(Path(FOLDER)).entries()[0]
    Registry(Path(FOLDER)).add(replace(entry, directory="nothing://bucket/run"))
    found += [call(capsys, *COMMANDS[command], *words) for words in ((), ("nothing",))]
    assert found[1].status == (0 if command in ("inspect", "report") else 2)
    assert found[2].status == (1 if command == "verify" else 2)
    assert "\n\n".join(told(each, PROJECT=project, ELSEWHERE=elsewhere) for each in found) == snapshot
    if command == "inspect":  # JSON has a list of the others; nothing if one was named
        assert json.loads(call(capsys, "inspect", "--json").out)["other_runs"] == [
            str(Path("fault_tolerance/cut").absolute())
        ]
        assert json.loads(call(capsys, "inspect", elsewhere / "fit-1", "--json").out)["other_runs"] == []


def test_finished_runs_are_listed_as_finished(project: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """With the command that reports them; what is left of one with another ``dirpath`` is its history."""
    assert told(call(capsys, "list"), PROJECT=project) == snapshot(name="here")
    [one] = json.loads(call(capsys, "list", "--json").out)["runs"]
    assert (one["is_finished"], one["directory"]) == (True, str(project / "fault_tolerance" / "finished"))
    run = project.parent / "else where" / "done"
    write_history(run, is_finished=True)
    for place in (run, run.parent, run / "history.jsonl"):
        assert told(call(capsys, "list", place), RUN=run) == snapshot(name="elsewhere")
        shown = json.loads(call(capsys, "list", place, "--json").out)
        assert (shown["checkpoints"], [one["directory"] for one in shown["runs"]]) == ([], [str(run)])
    assert call(capsys, "report", run).lines[0] == "Run done"
    assert told(call(capsys, "inspect", run), RUN=run) == snapshot(name="nothing to inspect")


def test_a_name_is_that_of_a_run_anywhere_below_this_directory(project: Path, capsys: Capture) -> None:
    """What `list` says to type works; of two runs with one name, the directories are named."""
    runs = [project / folder / "fault_tolerance" / "logged" for folder in ("logs", "more")]
    write_history(runs[0], is_finished=True)
    assert "report      lightning-faulttolerant report logged" in call(capsys, "list").out
    assert call(capsys, "report", "logged").lines[:2] == ["Run logged", "./logs/fault_tolerance/logged"]
    write_history(runs[1], is_finished=True)
    found = call(capsys, "report", "logged")
    assert (found.status, all(str(run.relative_to(project)) in found.err for run in runs)) == (2, True)
