"""``drill`` on a script that stands in for a training: what strikes it, what is said of it, and what is left."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.result import PlainProgress, RichProgress, Status, progress_on
from tests.cli.checkpoints import Result, call, told

Capture = pytest.CaptureFixture[str]
STAND_IN = Path(__file__).with_name("stand_in.py")
OTHER = (0.3).hex()
EVERYTHING = ("--epochs=2", "--batches=3", "--validation=3", "--test=5", "--predict=4")


def words(where: Path, *arguments: str) -> tuple[str, ...]:
    """Return the command of the script."""
    return (sys.executable, "-S", str(STAND_IN), str(where / "autosaves"), *arguments)


def autosaves(where: Path) -> list[str]:
    """Return the files left where the script keeps its autosaves."""
    return sorted(os.listdir(where / "autosaves")) if (where / "autosaves").exists() else []


def drill(capsys: Capture, where: Path, options: tuple[str, ...], *arguments: str) -> Result:
    """Drill the script with one strike, unless the options say otherwise."""
    return call(capsys, "drill", "--kills=1", "--seed=1", *options, "--", *words(where, *arguments))


def shown(found: Result, where: Path, *, is_held: bool = False) -> str:
    """Return the verdict and its text, without what differs from run to run."""
    text = told(Result(found.status, found.out, ""), DIR=where)
    if not is_held:  # a kill comes at any moment of its batch, and the script may be a batch behind
        text = re.sub(r"(?m)^( *\d+ +KILL +\w+ +)\d+( .* )\d+( +\d+(\.\d+)? (ms|s) *)$", r"\1N\2N\3", text)
    text = re.sub(r"\b[0-9a-f]{16}\b", "DIGEST", re.sub(r"\d+(\.\d+)? (ms|s)\b", "SECONDS", text))
    text = re.sub(r"drill-[\w-]+", "DRILL", re.sub(r"\d+\.\d{6,}(\.\.\.)?", "NUMBER", text))
    return re.sub(r"(?<=\S) {2,}", "  ", text)


def changed(event: str, **values: Any) -> str:
    """Return the option that changes what the script writes after a restart."""
    return f"--change={event} {json.dumps(values or None)}"


# The options of the drill, and the arguments of the script. The first word of the verdict is part of its snapshot.
EXACT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "killed twice": (("--kills=2",), ()),
    "ends well when it raises": (("--signal=exception",), ("--stops-with=0",)),
    "several fits": (("--kills=3", "--seed=4"), ("--fits=2", "--batches=5")),
    "all, stopped": (("--kills=4", "--signal=TERM"), EVERYTHING),
    "all, with exceptions": (("--kills=4", "--signal=exception"), EVERYTHING),
    "in named parts, before named batches": (("--in=validation,predict", "--at", "4", "8"), EVERYTHING),
    "no training": (("--kills=2",), ("--fits=0", "--test=6")),
    "more strikes than batches": (("--kills=7",), ("--epochs=1",)),
    "a launcher that restarts its ranks": (("--signal=exception",), ("--launcher",)),
    "the check passes": (("--check",), ()),
    "a value passed over": (("--ignore=sec*",), (changed("log", metrics={"seconds": OTHER}),)),
    "other surroundings": ((), (changed("fit", surroundings={"threads": 4}),)),
    "not restored exactly": ((), (changed("resumed", exact=False, not_exact=["the sampler"]),)),
}
CHANGES: dict[str, tuple[str, ...]] = {
    "other samples": (changed("batch", order="x", content="x", rng="x", loss=OTHER),),
    "generators": (changed("batch", rng="x", loss=OTHER),),
    "loss": (changed("batch", loss=OTHER, learning_rates=[[OTHER]]),),
    "loss in other surroundings": (changed("batch", loss=OTHER), changed("fit", surroundings={"threads": 4})),
    "learning rate": (changed("batch", learning_rates=[[OTHER]]),),
    "validation": (changed("validated", metrics={"accuracy": OTHER}),),
    "logged": (changed("log", metrics={"seconds": OTHER}),),
    "weights at the end": (changed("end", weights="x"),),
    "generators at the end": (changed("end", rng="x"),),
    "no end": (changed("end"),),
}
IN_TEST: dict[str, tuple[str, ...]] = {
    "other data": (changed("evaluated", content="x"),),
    "generators": (changed("evaluated", rng="x"),),
    "output": (changed("evaluated", output=OTHER),),
    "lost": (changed("evaluated"),),
    "returned": (changed("end", returned={"sum": OTHER}),),
}
BY_ITSELF: dict[str, tuple[str, ...]] = {
    "no seed": (changed("batch", rng="x", order="x", content="x", loss=OTHER),),
    "order": (changed("batch", order="x", content="x", since=1),),
    "content": (changed("batch", content="x", loss=OTHER),),
    "initial weights": (changed("batch", loss=OTHER),),
    "kernels": (changed("batch", loss=OTHER, since=2),),
    "a clock that is logged": (changed("log", metrics={"seconds": OTHER}),),
    "the course": (changed("validated"),),
}
FAULTY: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **{f"differs: {name}": (("--at", "3"), arguments) for name, arguments in CHANGES.items()},
    **{f"test: {name}": (("--in=test", "--at", "2"), ("--test=4", *more)) for name, more in IN_TEST.items()},
    **{f"by itself: {name}": (("--check",), ("--always", *arguments)) for name, arguments in BY_ITSELF.items()},
    "differs, and checked": (("--at=3", "--check"), CHANGES["loss"]),
    "begins again": ((), ("--begins-again",)),
    "fails": ((), ("--fails",)),
    "a restart fails": ((), ("--fails-again",)),
    "a restart is refused": ((), ("--is-refused",)),
    "catches the exception": (("--signal=exception",), ("--catches",)),
    "no autosaves": ((), ("--deaf",)),
    "no ledger": ((), ("--silent",)),
    "too long": (("--timeout=0.3",), ("--seconds=100",)),
    "after the end": (("--at=16",), ()),
    "no such part": (("--in=test",), ()),
}


@pytest.mark.parametrize("case", EXACT)
def test_a_script_without_a_flaw_is_exact(
    case: str, tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion
) -> None:
    """Each strike comes where it was asked for, after what was saved; each restart continues there."""
    options, arguments = EXACT[case]
    found = drill(capsys, tmp_path, options, *arguments)
    assert (found.status, autosaves(tmp_path)) == (0, [])
    assert shown(found, tmp_path, is_held="--at" in options) == snapshot


@pytest.mark.parametrize("case", FAULTY)
def test_a_flaw_is_found_and_its_cause_named(
    case: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """What differs, or keeps a drill from judging, is named with both values and its cause, and nothing is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    options, arguments = FAULTY[case]
    found = drill(capsys, tmp_path, options, *arguments)
    text = shown(found, tmp_path)
    assert text[max(text.find("DIFFERS"), 0) :] == snapshot
    assert max(map(len, text.splitlines())) <= 80
    assert case == "no ledger" or autosaves(tmp_path) == []
    assert ("  | ValueError: it fails" in found.err) == ("fails" in case)


def test_the_page_and_the_ledgers(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """If all is exact, the ledgers are removed, unless they were requested; a full disk costs only the page."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    page, kept = tmp_path / "page.html", tmp_path / "kept"
    for options in ((), (f"--output={kept}",)):
        found = drill(capsys, tmp_path, (f"--html={page}", *options))
        assert (found.status, os.listdir(tmp_path / "temporary")) == (0, [])
        assert ("ledgers and output" in page.read_text()) == bool(options)
        assert "uninterrupted  8 batches" in found.err
    assert (kept / "uninterrupted" / "process-0.jsonl").exists()
    assert drill(capsys, tmp_path, (f"--html={page}",), "--fails").status == 2
    assert "ValueError: it fails" in page.read_text()
    found = drill(capsys, tmp_path, ("--html=/dev/full",))
    assert (found.status, "EXACT" in found.out, "No space left" in found.err) == (2, True, True)


def test_the_time_to_the_first_batch_begins_with_the_process(tmp_path: Path, capsys: Capture) -> None:
    """What a restart does before its fit is a part of the time that a strike costs."""
    slowly = ("sh", "-c", 'sleep 0.3; exec "$@"', "sh", *words(tmp_path))
    found = call(capsys, "drill", "--kills=1", "--seed=1", "--", *slowly)
    assert (found.status, "EXACT" in found.out, re.findall(r" 0\.[0-2] s\n", found.out)) == (0, True, [])


def test_only_what_the_drill_has_caused_is_removed(tmp_path: Path, capsys: Capture) -> None:
    """The word {run} tells runs apart; a run of the user's own is neither continued with nor changed."""
    command = words(tmp_path / "{run}", "--epochs=1")
    assert call(capsys, "drill", "--kills=1", "--", *command).status == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"uninterrupted", "interrupted"}
    assert drill(capsys, tmp_path, (), "--run-id=mine").status == 0  # it did not exist
    mine, other = (tmp_path / "autosaves" / name for name in ("mine", "drill-other-interrupted"))
    other.mkdir(parents=True)
    mine.mkdir(exist_ok=True)
    state = {"epoch": 1, "batch": 2, "weight": 1.0, "outputs": [], "finished": False, "validating": False}
    (mine / "1.json").write_text(json.dumps({**state, "rng": [3, [0] * 625, None]}))
    found = drill(capsys, tmp_path, (), "--run-id=mine", "--seconds=0.1")
    assert (found.status, "Likely cause: existing run" in found.out) == (2, True)
    assert json.loads((mine / "1.json").read_text())["batch"] == 2
    assert sorted(autosaves(tmp_path)) == ["drill-other-interrupted", "mine"]


REFUSED = [
    ["--", "no-such-command"],
    ["--", "./file.py", "--kills"],
    ["--", "./file.sh"],
    ["--output", ".", "--", "python"],
    ["--html", "nowhere/page.html", "--", "python"],
    [],
    ["--kills", "0", "--", "python"],
    ["--timeout", "nan", "--", "python"],
]


def test_what_would_fail_in_the_end_is_refused_at_once(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """A wrong path or command, a number without a meaning, and no command are reported, and leave no directory."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    for name in ("file.py", "file.sh"):
        (tmp_path / name).write_text("no interpreter")
    monkeypatch.chdir(tmp_path)
    found = [call(capsys, "drill", *arguments) for arguments in REFUSED]
    assert {(each.status, each.out) for each in found} == {(2, "")}
    assert "\n".join(each.err.splitlines()[-1] for each in found) == snapshot
    assert os.listdir(tmp_path / "temporary") == []


@pytest.mark.parametrize("before", [[], ["--"], ["--kills", "1"], ["--kills", "1", "--"]])
def test_what_follows_the_command_is_the_commands(capsys: Capture, before: list[str]) -> None:
    """An option of the script is not the drill's, even without the --; the end of its output is shown."""
    found = call(capsys, "drill", *before, "false", "--seed", "x", "--out", "a", "--", "b")
    assert "Drill: false --seed x --out a -- b\n" in found.err
    assert found.err.endswith("process-0.log is empty.\n")


@pytest.mark.parametrize(
    ("signals", "status"),
    [((signal.SIGINT, signal.SIGTERM, signal.SIGINT), 130), ((signal.SIGTERM,), 143), ((signal.SIGHUP,), None)],
    ids=["SIGINT, and more", "SIGTERM", "SIGHUP under nohup"],
)
def test_a_signal_ends_a_drill_and_all_that_it_started(tmp_path: Path, signals: Any, status: int | None) -> None:
    """Ctrl-C, and a drill that is terminated, leave neither a process nor an autosave, however many signals come."""
    drilled = ("-m", "lightning_faulttolerant", "drill", "--", *words(tmp_path, "--seconds=100", "--launcher"))
    process = subprocess.Popen(
        (sys.executable, *drilled),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    while not list(tmp_path.glob("autosaves/*/*.json")):
        time.sleep(0.01)
    for signum in signals:
        process.send_signal(signum)
    if status is None:
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    process.communicate()
    assert process.returncode == (status or 143)
    assert autosaves(tmp_path) == []
    left = (path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    assert not [command for command in left if str(tmp_path).encode() in command]


# The terminal.


def test_the_verdict_has_a_color_on_a_terminal_only(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into a pipe, or with NO_COLOR set, no control character for a terminal is written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for value, text in (("", "\x1b[1;32mEXACT"), ("1", "EXACT")):
        monkeypatch.setenv("NO_COLOR", value)
        found = drill(capsys, tmp_path, ())
        assert (text in found.out, "\x1b" in found.out) == (True, "\x1b" in text)


def test_progress_is_plain_where_no_lines_can_move(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """On a terminal, lines move; elsewhere, one comes when a run begins and ends, and every ten seconds."""
    for is_terminal, name, kind in (
        (True, "xterm", RichProgress),
        (False, "xterm", PlainProgress),
        (True, "dumb", PlainProgress),
    ):
        monkeypatch.setenv("TERM", name)
        stream = io.StringIO()
        stream.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        with progress_on(stream) as progress:
            assert isinstance(progress, kind)
    clock = iter([0.0, 1.0, 12.0, 13.0])
    monkeypatch.setattr(result.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    plain = PlainProgress(stream)
    for done in range(4):
        plain.update(Status(run="interrupted", done=done, num_batches=9, num_wanted=2, saved=1))
    plain.end(Status(run="interrupted", done=9, num_strikes=2, num_wanted=2), 75.0)
    assert stream.getvalue() == snapshot
