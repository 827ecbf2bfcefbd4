from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from lightning_faulttolerant.cli import listing, main
from lightning_faulttolerant.records.lines import append_line
from tests.cli.checkpoints import call, save, save_series

Capture = pytest.CaptureFixture[str]

MODULE = [sys.executable, "-m", "lightning_faulttolerant"]
COMMANDS = ["list", "inspect", "verify", "prune", "report", "run", "drill"]


def test_the_console_script_is_the_command_line() -> None:
    """The installed script calls ``main``."""
    [point] = metadata.entry_points(group="console_scripts", name="lightning-faulttolerant")
    assert point.load() is main


def test_the_module_runs_as_a_program(tmp_path: Path) -> None:
    """``python -m lightning_faulttolerant`` is the same, with the exit status of the command."""
    save_series(tmp_path, 1)
    done = subprocess.run([*MODULE, "list", str(tmp_path), "--json"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert [entry["state"] for entry in json.loads(done.stdout)["checkpoints"]] == ["verified"]
    done = subprocess.run([*MODULE, "verify", str(tmp_path / "missing")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1


@pytest.mark.parametrize("command", ["list", "inspect", "verify", "prune", "report"])
def test_neither_lightning_nor_torch_is_loaded(tmp_path: Path, command: str) -> None:
    """No command on local files loads Lightning, torch, fsspec, or the drill's dependencies, so it answers quickly."""
    [path] = save_series(tmp_path, 1)
    append_line(tmp_path / "history.jsonl", {"event": "begin", "fit": 1, "time": 1.0})
    arguments = {"inspect": [path], "prune": [str(tmp_path), "--keep-last=1"]}.get(command, [str(tmp_path)])
    program = (
        "import sys; from lightning_faulttolerant.cli import main; status = main(sys.argv[1:])\n"
        "heavy = {'lightning', 'pytorch_lightning', 'torch', 'numpy', 'fsspec', 'lightning_faulttolerant.cli.drill'}\n"
        "loaded = heavy & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, command, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(capsys: Capture, command: str) -> None:
    """The help of a command says what it does and what its exit status means."""
    found = call(capsys, command, "--help")
    assert (found.status, found.err) == (0, "")
    assert "Exit status: 0 " in found.out
    assert len(found.out.splitlines()) > 10
    assert max(map(len, found.lines)) <= 120


def test_the_help_names_all_commands(capsys: Capture) -> None:
    """``--help`` lists the commands, and ``--version`` gives the installed version."""
    found = call(capsys, "--help")
    assert found.status == 0
    assert all(f"\n    {command} " in found.out for command in COMMANDS)
    assert call(capsys, "--version").out.strip() == metadata.version("lightning-faulttolerant")


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["list", "a", "b"], ["prune"], ["inspect", "--x", "a"]])
def test_wrong_usage_gives_status_2(capsys: Capture, arguments: list[str]) -> None:
    """Wrong arguments give status 2 and the usage, and no exception in the caller's process."""
    found = call(capsys, *arguments)
    assert (found.status, found.out) == (2, "")
    assert "usage: " in found.err


@pytest.mark.parametrize("num_files", [1, 300], ids=["before anything is written", "in the middle"])
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path, num_files: int) -> None:
    """If the output is no longer read, as after ``| head``, there is no traceback."""
    for number in range(num_files):
        save(tmp_path / f"{number:03d}-{'x' * 200}.ckpt")
    with subprocess.Popen(
        [*MODULE, "list", "--no-verify", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        if num_files > 1:
            assert process.stdout.readline() == f"{tmp_path}\n"
        process.stdout.close()
        error = process.stderr.read()
        assert process.wait(timeout=60) == 141
    assert error == ""


def test_any_name_can_be_printed_in_any_encoding(tmp_path: Path) -> None:
    """Characters that the terminal's encoding lacks are shown as escapes."""
    save(tmp_path / "größe-模型.ckpt")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*MODULE, "list", str(tmp_path)], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"gr\xf6\xdfe-\u6a21\u578b.ckpt" in done.stdout
    plain = subprocess.run(
        [*MODULE, "list", str(tmp_path)],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        timeout=60,
    )
    assert "größe-模型.ckpt".encode() in plain.stdout


def test_an_interruption_is_no_traceback(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a command with status 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing.found, "find_checkpoints", interrupt)
    found = call(capsys, "list", tmp_path)
    assert (found.status, found.err) == (130, "")


def test_a_directory_that_may_not_be_read_is_an_error(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the system refuses, the message is one line, with status 2."""

    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("lightning_faulttolerant.cli.found.os.scandir", refuse)
    for command in (["list"], ["prune", "--keep-last=1"]):
        found = call(capsys, *command, tmp_path)
        assert (found.status, found.out) == (2, "")
        assert found.err == f"lightning-faulttolerant: {tmp_path}: Permission denied\n"
    assert call(capsys, "verify", tmp_path).status == 2


def test_the_documentation_names_each_option_and_exit_status(capsys: Capture) -> None:
    """The page on the command line has a section for each command, with all its options and its exit status."""
    page = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text(encoding="utf-8")
    sections = {section.split("\n", 1)[0]: section for section in page.split("\n## ")[1:]}
    for command in COMMANDS:
        options = set(re.findall(r"--[a-z-]+", call(capsys, command, "--help").out)) - {"--help"}
        assert options, command
        assert {option for option in options if option not in sections[command]} == set()
        assert f"$ lightning-faulttolerant {command} " in sections[command]
        assert re.search(r"xit status(: 0 |\]\(.*\) is 0 )", sections[command])


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_devices_and_pipes_are_refused(tmp_path: Path, capsys: Capture, command: str) -> None:
    """A file without an end, or one that waits for a writer, is not read."""
    os.mkfifo(tmp_path / "pipe.ckpt")
    for path in (Path("/dev/zero"), tmp_path / "pipe.ckpt"):
        found = call(capsys, command, path)
        assert found.status == 2
        assert f"{path}: Not a regular file" in found.out + found.err
