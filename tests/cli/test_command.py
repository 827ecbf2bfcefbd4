"""The command line as a whole: how it starts, what it explains, what it refuses, and how it ends."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.cli import main
from lightning_faulttolerant.records.lines import append_line
from lightning_faulttolerant.storage.lock import RunLock
from tests.cli.checkpoints import call, save, save_series, told

Capture = pytest.CaptureFixture[str]
MODULE = [sys.executable, "-m", "lightning_faulttolerant"]
COMMANDS = ["list", "inspect", "verify", "discard", "prune", "export", "report", "run", "drill", "replay"]
SECTIONS = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8").split("\n## ")
DOCUMENTED = {section.split("\n", 1)[0]: section for section in SECTIONS if section.split("\n", 1)[0] in COMMANDS}


def test_the_module_runs_as_a_program_in_any_encoding(tmp_path: Path) -> None:
    """``python -m`` has the command's exit status; characters that the terminal's encoding lacks are escapes."""
    save(tmp_path / "größe-模型.ckpt")
    for encoding, name in (("ascii", rb"gr\xf6\xdfe-\u6a21\u578b.ckpt"), ("utf-8", "größe-模型.ckpt".encode())):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        words = [*MODULE, "verify", str(tmp_path), str(tmp_path / "missing")]
        done = subprocess.run(words, capture_output=True, env=environment)
        assert (done.returncode, done.stderr, name in done.stdout) == (1, b"", True)


def test_the_installed_script_is_the_command_line(capsys: Capture) -> None:
    """It calls ``main``, whose ``--version`` is the installed one."""
    [point] = metadata.entry_points(group="console_scripts", name="lightning-faulttolerant")
    assert point.load() is main
    assert call(capsys, "--version").out.strip() == metadata.version("lightning-faulttolerant")


def test_neither_lightning_nor_torch_is_loaded(tmp_path: Path) -> None:
    """No command on local files loads Lightning, torch, fsspec, or the drill's dependencies, so it answers quickly."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=9, incremental=True)
    series.save({"global_step": 1}, epoch=0, batch=1, global_step=1)
    [path] = series.paths()
    append_line(tmp_path / "history.jsonl", {"event": "begin", "fit": 1, "time": 1.0})
    calls = [["list", str(tmp_path)], ["inspect", path], ["verify", path], ["prune", str(tmp_path), "--keep-last=1"]]
    calls += [["report", str(tmp_path)], ["export", path, str(tmp_path / "plain.ckpt")], ["drill", "--", "false"]]
    program = (
        "import json, sys; from lightning_faulttolerant.cli import main\n"
        "heavy = {'lightning', 'pytorch_lightning', 'torch', 'numpy', 'fsspec', 'lightning_faulttolerant.cli.drill'}\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    heavy -= {f'lightning_faulttolerant.cli.{words[0]}'}\n"
        "    assert bool(main(words)) == (words[0] == 'drill'), words\n"
        "    assert not heavy & set(sys.modules), (words, heavy & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, json.dumps(calls)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_each_command_explains_itself(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str, snapshot: SnapshotAssertion
) -> None:
    """The help says what a command does, what each option does, and what its exit status means; so does the page."""
    monkeypatch.setenv("COLUMNS", "120")
    found = call(capsys, *([command] if command else []), "--help")
    assert (found.status, found.err) == (0, "")
    assert max(map(len, found.lines)) <= 120
    _usage, _, text = found.out.partition("\n\n")  # versions of Python break its lines differently
    assert text == snapshot
    if command in ("list", "inspect", "verify", "prune", "report", "run", "drill"):
        page = DOCUMENTED[command]
        options = set(re.findall(r"--[a-z-]+", found.out)) - {"--help"}
        assert {option for option in options if option not in page} == set()
        assert f"$ lightning-faulttolerant {command} " in page
        assert re.search(r"xit status(: 0 |\]\(.*\) is 0 )", page)


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["list", "a", "b"]])
def test_wrong_usage_gives_status_2(capsys: Capture, arguments: list[str]) -> None:
    """Wrong arguments give status 2 and the usage, and no exception in the caller's process."""
    found = call(capsys, *arguments)
    assert (found.status, found.out, found.err[:7]) == (2, "", "usage: ")


@pytest.mark.parametrize("num_files", [1, 300], ids=["before anything is written", "in the middle"])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, num_files: int) -> None:
    """If the output is no longer read, as after ``| head``, there is no traceback."""
    for number in range(num_files):
        (tmp_path / f"{number:03d}-{'x' * 200}.ckpt").write_text("none")
    words = [*MODULE, "list", "--no-verify", str(tmp_path)]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=kept) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if num_files > 1:
            assert process.stdout.readline() == f"{tmp_path}\n"
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == ("", 141)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (PermissionError(13, "Permission denied"), 2, "lightning-faulttolerant: DIR: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command_is_no_traceback(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    """Ctrl-C ends a command with status 130, and a directory that may not be read is one line, with status 2."""

    def refuse(path: Any, *_: Any, **__: Any) -> None:
        raise type(error)(*error.args, *([path] if error.args else []))

    monkeypatch.setattr(os, "scandir", refuse)
    for command in (["list"], ["prune", "--keep-last=1"], ["verify"]):
        found = call(capsys, *command, tmp_path)
        assert found.status == status
        assert command == ["verify"] or found.err.replace(str(tmp_path), "DIR") == said


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_devices_and_pipes_are_refused(tmp_path: Path, capsys: Capture, command: str) -> None:
    """A file without an end, or one that waits for a writer, is not read."""
    os.mkfifo(tmp_path / "pipe.ckpt")
    for path in (Path("/dev/zero"), tmp_path / "pipe.ckpt"):
        found = call(capsys, command, path)
        assert (found.status, f"{path}: Not a regular file" in found.out + found.err) == (2, True)


def test_discarded_autosaves_are_set_aside(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Those of all fits of a run, once; not those of one fit, of nothing, or of a run in use."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "fault_tolerance" / "run"
    for name in ("fit-1", "fit-2"):
        save_series(run / name, 2)
    with RunLock(run):
        found = [call(capsys, "discard", run)]
    found += [call(capsys, "discard", run / "fit-1"), call(capsys, "discard", tmp_path / "none")]
    assert len(list(run.glob("fit-*/autosave-*"))) == 4
    found += [call(capsys, "discard", run), call(capsys, "discard", run)]
    assert [each.status for each in found] == [1, 2, 2, 0, 1]
    assert len(list(run.glob("fit-*/superseded-0001-discarded/autosave-*"))) == 4
    assert "\n".join(told(each, DIR=tmp_path) for each in found) == snapshot
