"""What a person means: nothing, the name of a run, a checkpoint, a directory above, or a URL."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.storage.remote import RemoteStore
from lightning_faulttolerant.trainer.run.history_file import text_of
from tests.cli.checkpoints import call, save_series
from tests.records.made import Story

Capture = pytest.CaptureFixture[str]
COMMANDS = {
    "list": ("list",),
    "report": ("report",),
    "inspect": ("inspect",),
    "verify": ("verify",),
    "prune": ("prune", "--dry-run", "--keep-last", 1),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in a project with a run that was killed, and one that has finished."""
    project = tmp_path / "project"
    for name in ("cut", "finished"):
        story = Story(1_700_000_000.0).begin(since=10).start().train(100, 10).autosave()
        story = story.end().wait(5).done() if name == "finished" else story
        folder = project / "fault_tolerance" / name
        folder.mkdir(parents=True)
        (folder / "history.jsonl").write_bytes(text_of(story.lines))
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
        "checkpoint": [run / "fit-1" / "autosave-00000002-epoch=0-batch=2.ckpt"],
        "dirpath": ["fault_tolerance"],
        "above": [project],
        "above that": [project.parent],
        "file URL": [f"file://{run}"],
        "file URL of a fit": [f"file://{run}/fit-1"],
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
        assert "Run cut" in found.out or meaning in ("nothing", "dirpath", "above", "above that")
    else:
        assert "autosave-0000000" in found.out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("inner", ["", "/cut", "/cut/fit-1"])
def test_a_url(command: str, inner: str, capsys: Capture) -> None:
    """In a store, too, a directory above, a run, and a fit are found."""
    url = f"memory://{uuid.uuid4().hex}"
    story = Story(1_700_000_000.0).begin(since=10).start().train(100, 10).autosave()
    RemoteStore(f"{url}/cut").replace("history.jsonl", text_of(story.lines))
    save_series(f"{url}/cut/fit-1", 2)
    found = call(capsys, *COMMANDS[command], url + inner)
    assert (found.status, found.err) == (0, ""), found
    assert ("Run cut" if command == "report" else "autosave-0000000") in found.out


@pytest.mark.parametrize("command", COMMANDS)
def test_what_does_not_exist_is_named(command: str, project: Path, capsys: Capture) -> None:
    """With what was typed; for runs, the command that lists them."""
    found = call(capsys, *COMMANDS[command], "nothing")
    assert found.status == (1 if command == "verify" else 2)
    said = (
        "nothing: missing: the file does not exist" if command == "verify" else "nothing: No such file or directory, "
    )
    assert said in found.out + found.err


def test_finished_fits_are_listed_as_finished(project: Path, capsys: Capture) -> None:
    """As text with the command that reports them, and as JSON."""
    assert "lightning-faulttolerant report finished" in call(capsys, "list").out
    [one] = json.loads(call(capsys, "list", "--json").out)["runs"]
    assert (one["run_id"], one["is_finished"]) == ("finished", True)
    assert one["directory"] == str(project / "fault_tolerance" / "finished")
