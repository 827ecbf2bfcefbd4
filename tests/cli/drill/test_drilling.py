"""Drills of the script that stands in for a training: what strikes it, what is found, and that nothing is left."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.ledgers import STAGES
from lightning_faulttolerant.cli.drill.process import ProcessTree
from lightning_faulttolerant.cli.drill.result import DrillResult
from lightning_faulttolerant.processes import is_running
from tests.cli.drill.drills import drill, make, words

NUM_BATCHES = 16
# It saves only where the drill asks for it, and runs as fast as it can.
HEEDS = ("--every=0", "--seconds=0", "--heeds")
EVALUATES = (*HEEDS, "--epochs=2", "--batches=3", "--validation=3", "--test=5", "--predict=4")
EXIT_CODES = {"KILL": -9, "TERM": 143, "exception": 1}


# Each of them starts as many processes, and shows the same of another part.
SLOW = {
    *("data order", "main RNG", "weights", "metrics", "logged values", "no seed, unchecked", "threads", "not exact"),
    *("ends well when it raises", "a stop needs no autosave", "saves nothing by itself", "several fits"),
    *("the check passes", "a clock passed over", "test: begins again", "predict: prediction lost"),
}


def autosaves(directory: Path) -> list[str]:
    """Return the files left where the script keeps its autosaves."""
    path = directory / "autosaves"
    return sorted(os.listdir(path)) if path.exists() else []


def assert_exact(found: DrillResult, num_batches: int, num_strikes: int = 2) -> None:
    """Check that a drill found nothing, and struck the requested number of times."""
    assert found.verdict.word == result.EXACT, found
    assert len(found.strikes) == num_strikes
    assert found.uninterrupted is not None
    assert found.interrupted is not None
    losses = [[point.loss for point in run.curve] for run in (found.uninterrupted, found.interrupted)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == num_batches


@pytest.mark.parametrize("kind", EXIT_CODES)
def test_each_kind_of_strike_interrupts_and_the_run_continues(tmp_path: Path, kind: str) -> None:
    """Each strike hits after an autosave with progress, and the restart continues there, not from the beginning."""
    found = drill(tmp_path, kind=kind)
    assert_exact(found, NUM_BATCHES)
    for strike in found.strikes:
        assert 0 < strike.resumed_at <= strike.at < NUM_BATCHES
        assert strike.num_twice == strike.at - strike.resumed_at
        assert strike.resumed_text.startswith("before batch")
        assert strike.exit_code == EXIT_CODES[kind]
    assert (found.kind, found.seed, found.num_wanted, found.versions["threads"]) == (kind, 1, 2, "2")
    assert autosaves(tmp_path) == []


@pytest.mark.parametrize(
    "kind", ["KILL", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("TERM", "exception"))]
)
def test_every_stage_of_a_script_is_struck_and_compared(kind: str, tmp_path: Path) -> None:
    """A script that fits, tests, and predicts is drilled as one, with strikes in each, and each continues inside."""
    found = drill(tmp_path, *EVALUATES, kind=kind, num_strikes=4)
    assert_exact(found, 6, 4)
    assert {strike.stage for strike in found.strikes} == set(STAGES)
    for strike in found.strikes:
        assert strike.num_twice <= 4
        assert (strike.resumed_batch is None) == (strike.stage == "train")
        assert strike.resumed_batch is None or 0 <= strike.resumed_batch <= strike.batch
    assert found.interrupted is not None
    assert found.interrupted.num_evaluated == 15
    assert "6 batches, 2 validation runs, 15 evaluation batches" in found.verdict.text
    stays = drill(tmp_path / "more", *EVALUATES, kind=kind, stages=("validation",), num_strikes=9)
    assert stays.verdict.word == result.EXACT
    assert len(stays.strikes) >= 2
    hook = "start" if kind == "exception" else ""
    assert {(strike.stage, strike.hook) for strike in stays.strikes} == {("validation", hook)}


# The arguments of the script, the settings of the drill, and where each strike hit.
EXACT: dict[str, tuple[tuple[str, ...], dict[str, Any], int, list[int]]] = {
    "at batches that were asked for": (
        ("--batches=4", "--every=1", "--seconds=0.2"),
        {"at": (2, 5), "num_strikes": 7},
        8,
        [2, 5],
    ),
    "ends well when stopped": (("--epochs=1", "--stops-with=0"), {"kind": "TERM", "num_strikes": 1}, 8, []),
    "ends well when it raises": (("--epochs=1", "--stops-with=0"), {"kind": "exception", "num_strikes": 1}, 8, []),
    "saves nothing by itself": ((*HEEDS, "--epochs=1"), {"num_strikes": 3}, 8, []),
    "saves where it is told": ((*HEEDS, "--epochs=1"), {"at": (1, 4, 7)}, 8, [1, 4, 7]),
    "a stop needs no autosave": ((*HEEDS, "--epochs=1"), {"kind": "TERM"}, 8, []),
    "a stop where it is told": ((*HEEDS, "--epochs=1"), {"kind": "TERM", "at": (1, 7)}, 8, [1, 7]),
    "a clock passed over": (("--flaw=clock",), {"num_strikes": 1, "ignored": ("sec*",)}, 16, []),
    "several fits": ((*HEEDS, "--fits=2", "--batches=5"), {"num_strikes": 3, "seed": 4}, 20, []),
    "the check passes": ((*HEEDS,), {"num_strikes": 1, "is_checked": True}, 16, []),
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in EXACT])
def test_a_script_without_a_flaw_is_exact(case: str, tmp_path: Path) -> None:
    """Each strike comes where it was asked for, after what was saved, and nothing differs."""
    arguments, settings, num_batches, at = EXACT[case]
    found = drill(tmp_path, *arguments, **settings)
    assert_exact(found, num_batches, len(at) or settings.get("num_strikes", 2))
    assert not at or [strike.at for strike in found.strikes] == at
    if "--stops-with=0" in arguments:
        assert found.strikes[0].exit_code == 0
    if "--heeds" in arguments:
        assert all(0 < strike.resumed_at <= strike.at <= strike.resumed_at + 4 for strike in found.strikes)
        assert not at or all(strike.resumed_at == strike.at for strike in found.strikes)
    if settings.get("kind") == "TERM" and "--heeds" in arguments:
        assert [strike.num_twice for strike in found.strikes] == [0, 0]
    if case == "several fits":
        assert {strike.fit for strike in found.strikes} == {1, 2}
    assert found.interrupted is not None
    # That of the start, one for each strike, that of the end.
    assert case not in ("saves nothing by itself", "saves where it is told") or found.interrupted.num_autosaves == 5


def test_strikes_that_can_not_come_are_reported(tmp_path: Path) -> None:
    """Each has to come after another batch; in named stages, exactly before named batches; in no training, too."""
    found = drill(tmp_path, *HEEDS, "--epochs=1", "--batches=4", num_strikes=7)
    assert_exact(found, 4, 3)
    assert "Interrupted 3 times, by 3 of 7 strikes" in found.verdict.text
    found = drill(tmp_path / "named", *EVALUATES, stages=("validation", "predict"), at=(4, 8), num_strikes=9)
    struck = [(strike.stage, strike.batch, strike.num_twice) for strike in found.strikes]
    assert (found.verdict.word, struck) == (result.EXACT, [("validation", 1, 0), ("predict", 2, 0)])
    found = drill(tmp_path / "tests", *HEEDS, "--fits=0", "--test=6")
    assert [strike.stage for strike in found.strikes if strike.resumed_batch] == ["test", "test"]
    assert "6 evaluation batches and everything that evaluations returned" in found.verdict.text


# The arguments of the script, the settings of the drill, the verdict, the cause, and where the difference shows.
FLAWS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, str, str]] = {
    **{
        flaw: ((f"--flaw={flaw}",), {"num_strikes": 1, "seed": 3}, result.DIFFERS, flaw, "")
        for flaw in ("augmentation", "data order", "main RNG", "weights", "metrics", "logged values")
    },
    "begins again": (("--flaw=begins again",), {}, result.NOT_RESUMED, "not resumed", ""),
    "no seed": (("--flaw=no seed",), {"is_checked": True}, result.NOT_JUDGED, "no seed", "batch 0 of epoch 0"),
    "no seed, unchecked": (("--flaw=no seed",), {"num_strikes": 1}, result.NOT_JUDGED, "no seed", "batch 0 of epoch 0"),
    "clock": (("--flaw=clock",), {"num_strikes": 1}, result.NOT_JUDGED, "logged values", ""),
    "threads": (("--flaw=threads", "--flaw=weights"), {"num_strikes": 1}, result.DIFFERS, "surroundings", ""),
    "not exact": (("--flaw=not exact", "--flaw=weights"), {}, result.DIFFERS, "not restored exactly", ""),
    "no autosaves": (("--every=0", "--epochs=1"), {}, result.NOT_JUDGED, "too few autosaves", ""),
    "fails": (("--fails=always",), {}, result.NOT_JUDGED, "script", ""),
    "fails again": (("--fails=again",), {}, result.NOT_RESUMED, "restart", ""),
    "no ledger": (("--silent", "--epochs=1"), {}, result.NOT_JUDGED, "no ledger", ""),
    "too long": (("--seconds=100",), {"timeout_seconds": 0.3}, result.NOT_JUDGED, "timeout", ""),
    "after the end": ((), {"at": (16,)}, result.NOT_JUDGED, "usage", ""),
    "no such stage": ((*EVALUATES[:-2],), {"stages": ("test",)}, result.NOT_JUDGED, "usage", ""),
    "validation: position lost": (
        (*EVALUATES, "--flaw=position lost"),
        {"stages": ("validation",), "at": (1,)},
        result.DIFFERS,
        "course of the run",
        "batch 1 of the validation run after batch 2 of epoch 0",
    ),
    "test: metrics doubled": (
        (*EVALUATES, "--flaw=metrics doubled"),
        {"stages": ("test",), "at": (1,)},
        result.DIFFERS,
        "returned results",
        "the end of test",
    ),
    "predict: prediction lost": (
        (*EVALUATES, "--flaw=prediction lost"),
        {"stages": ("predict",), "at": (1,)},
        result.DIFFERS,
        "returned results",
        "the end of predict",
    ),
    "test: begins again": (
        (*HEEDS, "--fits=0", "--test=6", "--flaw=begins again"),
        {"num_strikes": 1},
        result.NOT_RESUMED,
        "not resumed",
        "",
    ),
}


@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in FLAWS])
def test_a_flaw_is_found_and_its_cause_named(case: str, tmp_path: Path) -> None:
    """What restarts in each process, or keeps a drill from judging, is named, and nothing is left."""
    arguments, settings, word, part, place = FLAWS[case]
    one = make(tmp_path, *arguments, **settings)
    found = one.run()
    assert found.verdict.word == word
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == part
    difference = found.verdict.difference
    if place:
        assert difference is not None
        assert difference.place == place
    if word == result.DIFFERS and difference is not None:
        assert difference.number >= found.strikes[0].resumed_at > 0
        assert any("--check" in note for note in found.verdict.notes)
    if case.startswith("no seed"):
        second = found.repeated if settings.get("is_checked") else found.interrupted
        assert second is not None
        assert (len(second.curve), second.is_complete) == (1, False)
    if case == "no autosaves":
        assert found.interrupted is not None
        assert (found.strikes, found.interrupted.num_processes) == ((), 1)
    if case.startswith("fails"):
        assert one.failed_output is not None
        assert "ValueError: it fails" in one.failed_output.read_text()
    assert case == "no ledger" or autosaves(tmp_path) == []


def test_an_existing_run_is_not_continued_with(tmp_path: Path) -> None:
    """A script that continues from its own checkpoint is ended before it does anything to it."""
    assert_exact(drill(tmp_path, "--run-id", "mine", num_strikes=1), NUM_BATCHES, 1)  # nothing existed
    autosave = tmp_path / "autosaves" / "mine" / "fit-1.json"
    state = {"epoch": 1, "batch": 2, "weight": 1.0, "rng": random.Random(1).getstate(), "finished": False}
    autosave.write_text(json.dumps(state))
    found = drill(tmp_path, "--seconds", "0.1", "--run-id", "mine", directory=tmp_path / "again")
    assert found.verdict.word == result.NOT_JUDGED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "existing run"
    assert json.loads(autosave.read_text())["epoch"] == 1


def test_only_what_the_drill_has_caused_is_removed(tmp_path: Path) -> None:
    """The word {run} tells runs apart; a directory of autosaves goes if the drill has caused it; others' files stay."""
    drill(tmp_path, num_strikes=1, command=(*words(tmp_path / "{run}"), *HEEDS, "--epochs=1"))
    assert {path.name for path in tmp_path.iterdir()} >= {"uninterrupted", "interrupted"}
    own, others = (tmp_path / name / "fault_tolerance" for name in ("own", "others"))
    (others / "mine").mkdir(parents=True)
    for directory in (own, others):
        place = tmp_path / f"drill-{directory.parent.name}"
        drill(place, command=(*words(tmp_path)[:-1], str(directory), *HEEDS, "--epochs=1"), num_strikes=1)
    assert (own.exists(), os.listdir(others)) == (False, ["mine"])
    for name in ("drill-t-interrupted-mine", "drill-other-interrupted"):
        (tmp_path / "autosaves" / name).mkdir(parents=True)
    assert drill(tmp_path, "--fails=again", token="t", directory=tmp_path / "third").verdict.word == result.NOT_RESUMED
    assert autosaves(tmp_path) == ["drill-other-interrupted"]


def test_what_interrupts_a_drill_leaves_nothing_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends a drill, also right after the start of its script, ends all processes and removes autosaves."""

    class StopError(Exception):
        pass

    def interrupt(_: object) -> None:
        if autosaves(tmp_path):
            raise StopError

    one = make(tmp_path, "--seconds", "0.05")
    monkeypatch.setattr(one.progress, "update", interrupt)
    with pytest.raises(StopError):
        one.run()
    assert autosaves(tmp_path) == []
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> None:
        start(*arguments, **options).returncode = 0  # no code waits for it
        raise KeyboardInterrupt

    one = make(tmp_path / "more", "--seconds", "100")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    own = str(os.getpid())
    entries = [entry for entry in Path("/proc").iterdir() if entry.name.isdecimal() and entry.name != own]
    assert not [entry for entry in entries if str(tmp_path).encode() in command_line(entry)]


def command_line(process: Path) -> bytes:
    """Return the command line of a process, empty if it is gone."""
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


# Starts a child in its own session, and that child another; each writes its process id.
PROGRAM = """
import os, subprocess, sys, time
depth, directory = int(sys.argv[1]), sys.argv[2]
open(os.path.join(directory, str(os.getpid())), "w").close()
if depth:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3], str(depth - 1), *sys.argv[2:]], start_new_session=True)
if depth == 1:
    sys.exit()
time.sleep(100)
"""


def test_all_that_a_process_has_started_is_killed(tmp_path: Path) -> None:
    """Children in their own sessions, and those with a dead parent, are killed too."""
    tree = ProcessTree(
        [sys.executable, "-S", "-c", PROGRAM, "2", str(tmp_path), PROGRAM],
        environment=os.environ,
        token=secrets.token_hex(4),
        output=tmp_path / "output",
    )
    tree.start()
    while len(found := [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]) < 3:
        time.sleep(0.005)
    assert tree.exit_code is None
    tree.close()
    tree.close()
    assert tree.exit_code == -9
    assert not any(map(is_running, found))
