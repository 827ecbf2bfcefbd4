from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.drill import command
from lightning_faulttolerant.cli.drill.command import ended_by_signals
from tests.cli.checkpoints import call, told
from tests.cli.drill.drills import environment, seen_progress_on, words

Capture = pytest.CaptureFixture[str]


def test_a_drill_on_the_command_line(tmp_path: Path) -> None:
    """Progress goes to one stream and the verdict to the other, the page is written, and torch is not loaded."""
    program = (
        "import pathlib, sys\n"
        "from lightning_faulttolerant.cli import main\n"
        "from lightning_faulttolerant.cli.drill import command\n"
        "from tests.cli.drill.drills import seen_progress_on\n"
        f"command.progress_on = seen_progress_on(pathlib.Path({str(tmp_path)!r}))\n"
        "status = main(sys.argv[1:])\n"
        "loaded = {'lightning', 'torch', 'numpy', 'rich'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else status)"
    )
    page = tmp_path / "page.html"
    options = ["--kills=1", "--seed=1", f"--html={page}", f"--output={tmp_path / 'kept'}"]
    done = subprocess.run(
        [sys.executable, "-c", program, "drill", *options, "--", *words(tmp_path)],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "EXACT" in done.stdout
    assert "uninterrupted  16 batches" in done.stderr
    assert "<html" in page.read_text()
    assert (tmp_path / "kept" / "uninterrupted" / "process-0.jsonl").exists()


def test_the_page_names_the_directory_of_the_ledgers_if_it_stays(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If all is exact, the directory is removed, unless it was requested; a full disk costs only the page."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(command, "progress_on", seen_progress_on(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    page = tmp_path / "page.html"
    for options, is_kept in (([], False), ([f"--output={tmp_path / 'kept'}"], True)):
        words_of_script = words(tmp_path, "--heeds", "--epochs=1")
        found = call(capsys, "drill", "--kills=1", "--seed=1", f"--html={page}", *options, "--", *words_of_script)
        assert (found.status, os.listdir(tmp_path / "temporary")) == (0, [])
        assert ("ledgers and output" in page.read_text()) == is_kept
    found = call(capsys, "drill", "--kills=1", "--seed=1", "--html=/dev/full", "--", *words_of_script)
    assert (found.status, "EXACT" in found.out, "No space left" in found.err) == (2, True, True)


def test_the_end_of_what_a_script_printed_is_shown_when_it_fails(tmp_path: Path, capsys: Capture) -> None:
    """If the script fails by itself, its own output says most, on the terminal and on the page."""
    page = tmp_path / "page.html"
    found = call(capsys, "drill", f"--html={page}", "--", *words(tmp_path, "--fails=always"))
    assert "ValueError: it fails" in page.read_text()
    assert found.status == 2
    assert "  | ValueError: it fails" in found.err
    assert "NOT JUDGED" in found.out
    silent = call(capsys, "drill", f"--output={tmp_path / 'kept'}", "--", "false")
    assert silent.err.endswith("process-0.log is empty.\n")


def test_the_first_signal_ends_a_drill_and_no_more_interrupt_that() -> None:
    """A second Ctrl-C does not interrupt the cleanup of the started processes, and nohup still works."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with pytest.raises(SystemExit, match="143"):
            end_three_times()
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGHUP, before)


def end_three_times() -> None:
    """Send this process a signal that it ignores, one that ends it, and more in the meantime."""
    with ended_by_signals():
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            for signum in (signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), signum)


REFUSED = [
    ["--", "no-such-command"],
    ["--", "./file.py", "--kills"],
    ["--", "./file.sh"],
    ["--output", ".", "--", "python"],
    ["--html", "nowhere/page.html", "--", "python"],
    ["--html", ".", "--", "python"],
]


def test_what_would_fail_in_the_end_is_refused_at_once(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """A wrong path or command, a number without a meaning, and no command are reported before anything runs."""
    (tmp_path / "file.py").touch()
    (tmp_path / "file.sh").touch()
    monkeypatch.chdir(tmp_path)
    found = [call(capsys, "drill", *arguments) for arguments in REFUSED]
    assert {(each.status, each.out) for each in found} == {(2, "")}
    assert "\n".join(told(each, DIR=tmp_path) for each in found) == snapshot
    for wrong in ([], ["--kills", "0", "--", "python"], ["--timeout", "nan", "--", "python"], ["--signal", "x", "a"]):
        usage = call(capsys, "drill", *wrong)
        assert (usage.status, usage.out, "usage: " in usage.err) == (2, "", True)


def test_a_command_that_can_not_be_started_leaves_no_directory(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script without an interpreter is reported, and there are no ledgers of it to keep."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = tmp_path / "script"
    script.write_text("no interpreter")
    script.chmod(0o755)
    found = call(capsys, "drill", "--", str(script))
    assert (found.status, os.listdir(tmp_path)) == (2, ["script"])
    assert "Exec format error" in found.err


@pytest.mark.parametrize("before", [[], ["--"], ["--kills", "1"], ["--kills", "1", "--"]])
def test_what_follows_the_command_is_the_commands(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, before: list[str]
) -> None:
    """An option of the script is not the drill's, even without the --."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    found = call(capsys, "drill", *before, "echo", "--seed", "x", "--out", "a", "--", "b")
    assert "Drill: echo --seed x --out a -- b\n" in found.err


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_drill_and_its_script(tmp_path: Path, signum: int, status: int) -> None:
    """Ctrl-C, and a drill that is terminated, leave neither a process nor an autosave."""
    process = subprocess.Popen(
        [sys.executable, "-m", "lightning_faulttolerant", "drill", "--", *words(tmp_path, "--seconds=100")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(TMPDIR=str(tmp_path)),
    )
    autosaves = tmp_path / "autosaves"
    while not list(autosaves.glob("*/*.json")):
        time.sleep(0.01)
    process.send_signal(signum)
    process.communicate()
    assert process.returncode == status
    assert os.listdir(autosaves) == []
    assert not [
        entry for entry in Path("/proc").iterdir() if entry.name.isdecimal() and str(tmp_path) in command_line(entry)
    ]


def command_line(process: Path) -> str:
    """Return the command line of a process, empty if it is gone."""
    try:
        return (process / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
