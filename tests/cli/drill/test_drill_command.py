from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from lightning_faulttolerant.cli.drill import command
from lightning_faulttolerant.cli.drill.command import ended_by_signals
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, join
from lightning_faulttolerant.cli.drill.process import DrillSettings
from lightning_faulttolerant.cli.drill.strikes import moments_of
from tests.cli.checkpoints import call
from tests.cli.drill.drills import environment, seen_progress_on, words
from tests.cli.drill.made import batch_line, begun

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
        timeout=100,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    assert "EXACT" in done.stdout
    assert "uninterrupted  16 batches" in done.stderr
    assert "<html" in page.read_text()
    assert (tmp_path / "kept" / "uninterrupted" / "process-0.jsonl").exists()


@pytest.mark.parametrize("is_kept", [False, True])
def test_the_page_names_the_directory_of_the_ledgers_if_it_stays(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, is_kept: bool
) -> None:
    """If all is exact, the directory is removed, unless it was requested."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(command, "progress_on", seen_progress_on(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    page = tmp_path / "page.html"
    options = ["--kills=1", "--seed=1", f"--html={page}", *([f"--output={tmp_path / 'kept'}"] if is_kept else [])]
    found = call(capsys, "drill", *options, "--", *words(tmp_path))
    assert found.status == 0
    assert os.listdir(tmp_path / "temporary") == []
    assert ("ledgers and output" in page.read_text()) == is_kept


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


def test_the_verdict_is_told_though_the_page_can_not_be_written(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at the end of a drill costs only the page."""
    monkeypatch.setattr(command, "progress_on", seen_progress_on(tmp_path))
    found = call(capsys, "drill", "--kills=1", "--seed=1", "--html=/dev/full", "--", *words(tmp_path))
    assert found.status == 2
    assert "EXACT" in found.out
    assert "No space left" in found.err


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "no-such-command"], "no such command"),
        (["--", "./file.py", "--kills"], "not a command; did you mean: python ./file.py"),
        (["--", "./file.sh"], "chmod +x ./file.sh makes it one"),
        (["--output", ".", "--", "python"], "is not empty"),
        (["--html", "nowhere/page.html", "--", "python"], "no such directory"),
        (["--html", ".", "--", "python"], "is a directory"),
    ],
)
def test_what_would_fail_in_the_end_is_refused_at_once(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    """A wrong path or command is reported before anything runs."""
    (tmp_path / "file.py").touch()
    (tmp_path / "file.sh").touch()
    monkeypatch.chdir(tmp_path)
    found = call(capsys, "drill", *arguments)
    assert (found.status, found.out) == (2, "")
    assert message in found.err


@pytest.mark.parametrize(
    "arguments", [[], ["--kills", "0", "--", "python"], ["--timeout", "nan", "--", "python"], ["--signal", "x", "a"]]
)
def test_wrong_arguments_of_a_drill_give_the_usage(capsys: Capture, arguments: list[str]) -> None:
    """Numbers without a meaning, and a drill without a command, are refused."""
    found = call(capsys, "drill", *arguments)
    assert (found.status, found.out) == (2, "")
    assert "usage: " in found.err


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
    deadline = time.monotonic() + 60
    while not list(autosaves.glob("*/*.json")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signum)
    process.communicate(timeout=60)
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


def numbers(num_batches: int) -> BatchNumbers:
    """Return the numbers of the batches of one epoch."""
    return BatchNumbers(join(0, [[begun(), *(batch_line(0, batch) for batch in range(num_batches))]]).steps)


def test_moments_are_spread_over_the_run() -> None:
    """Each of equal parts of a run has one moment, never before the first batch is done; a seed gives the same ones."""
    for seed in range(20):
        settings = DrillSettings(command=("x",), num_strikes=5, seed=seed, directory=Path(), token="t")
        found = moments_of(settings, numbers(101))
        assert [(moment.batch - 1) // 20 for moment in found] == [0, 1, 2, 3, 4]
        assert found == moments_of(settings, numbers(101))
        assert all(0 <= moment.fraction < 1 for moment in found)
    assert moments_of(settings, numbers(1)) == []  # nothing can be saved before it
    at = DrillSettings(command=("x",), at=(9, 3, 9), directory=Path(), token="t")
    assert [moment.batch for moment in moments_of(at, numbers(101))] == [3, 9]
