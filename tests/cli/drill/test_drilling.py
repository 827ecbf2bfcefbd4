from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.cli.drill import result, running
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, join
from lightning_faulttolerant.cli.drill.process import DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.result import DrillResult
from lightning_faulttolerant.cli.drill.strikes import StrikeMoment, stretches_of
from lightning_faulttolerant.records.lines import Line, append_line
from tests.cli.drill.drills import ToldProgress, drill, make, words
from tests.cli.drill.made import autosave_line, batch_line, begun, fit_lines, line, resumed

NUM_BATCHES = 16


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
    assert len(found.uninterrupted.curve) == len(found.interrupted.curve) == num_batches
    assert [point.loss for point in found.uninterrupted.curve] == [point.loss for point in found.interrupted.curve]


@pytest.mark.parametrize("kind", ["KILL", "TERM", "exception"])
def test_each_kind_of_strike_interrupts_and_the_run_continues(tmp_path: Path, kind: str) -> None:
    """Each strike hits after an autosave with progress, and the restart continues there, not from the beginning."""
    found = drill(tmp_path, kind=kind)
    assert_exact(found, NUM_BATCHES)
    for strike in found.strikes:
        assert 0 < strike.resumed_at <= strike.at < NUM_BATCHES
        assert strike.num_twice == strike.at - strike.resumed_at
        assert strike.resumed_text.startswith("before batch")
        assert strike.exit_code == {"KILL": -9, "TERM": 143, "exception": 1}[kind]
    assert (found.kind, found.seed, found.num_wanted) == (kind, 1, 2)
    assert found.versions["threads"] == "2"
    assert autosaves(tmp_path) == []


@pytest.mark.parametrize("kind", ["TERM", "exception"])
def test_a_script_that_ends_well_when_it_is_stopped_continues(tmp_path: Path, kind: str) -> None:
    """An exit code of 0 in the middle of the training, as of a script that catches exceptions, does not end the run."""
    found = drill(tmp_path, "--epochs", "1", "--stops-with", "0", kind=kind, num_strikes=1)
    assert_exact(found, 8, 1)
    assert found.strikes[0].exit_code == 0


@pytest.mark.slow
def test_several_fits_are_drilled_as_one_run(tmp_path: Path) -> None:
    """Strikes are spread over all fits of a script, and places are those of the fit."""
    found = drill(tmp_path, "--fits", "2", "--batches", "5", num_strikes=3, seed=4)
    assert_exact(found, 20, 3)
    assert {strike.fit for strike in found.strikes} == {1, 2}


def test_the_batches_that_were_asked_for_are_struck(tmp_path: Path) -> None:
    """With ``--at``, a strike comes as soon as that number of batches is done, regardless of the number of strikes."""
    found = drill(tmp_path, "--batches", "4", "--every", "1", "--seconds", "0.2", at=(2, 5), num_strikes=7)
    assert_exact(found, 8)
    assert [strike.at for strike in found.strikes] == [2, 5]


def test_a_batch_after_the_end_can_not_be_struck(tmp_path: Path) -> None:
    """A number that the run never reaches is reported, with the number of batches."""
    found = drill(tmp_path, at=(16,))
    assert found.verdict.word == result.NOT_JUDGED
    assert "--at 16" in found.verdict.text
    assert "16 batches" in found.verdict.text


@pytest.mark.parametrize(
    "flaw",
    [
        "augmentation",
        *(pytest.param(flaw, marks=pytest.mark.slow) for flaw in ("data order", "main RNG", "weights")),
        *(pytest.param(flaw, marks=pytest.mark.slow) for flaw in ("metrics", "logged values")),
    ],
)
def test_a_flaw_is_found_and_its_cause_named(tmp_path: Path, flaw: str) -> None:
    """The part of a script that restarts in each process is named as the likely cause."""
    found = drill(tmp_path, "--flaw", flaw, num_strikes=1, seed=3)
    assert found.verdict.word == result.DIFFERS
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == flaw
    assert found.verdict.difference is not None
    assert found.verdict.difference.number >= found.strikes[0].resumed_at > 0
    assert any("--check" in note for note in found.verdict.notes)


def test_a_script_that_starts_over_is_ended_at_once(tmp_path: Path) -> None:
    """A restart that does not resume is reported as such, and nothing is left of it."""
    found = drill(tmp_path, "--flaw", "begins again")
    assert found.verdict.word == result.NOT_RESUMED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "not resumed"
    assert autosaves(tmp_path) == []


@pytest.mark.parametrize("is_checked", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_script_without_a_seed_can_not_be_judged(tmp_path: Path, is_checked: bool) -> None:
    """Runs that already differ without an interruption are reported as such, at the first batch that shows it."""
    found = drill(tmp_path, "--flaw", "no seed", is_checked=is_checked, num_strikes=1)
    assert found.verdict.word == result.NOT_JUDGED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "no seed"
    assert (found.interrupted is None, found.repeated is not None) == (is_checked, is_checked)
    second = found.repeated if is_checked else found.interrupted
    assert second is not None
    assert (len(second.curve), second.is_complete) == (1, False)


@pytest.mark.slow
def test_a_script_that_passes_the_check_is_drilled(tmp_path: Path) -> None:
    """Two equal uninterrupted runs are followed by the interrupted one."""
    found = drill(tmp_path, is_checked=True, num_strikes=1)
    assert_exact(found, NUM_BATCHES, 1)
    assert found.repeated is not None
    assert found.repeated.is_complete


def test_what_the_clock_gives_can_be_passed_over(tmp_path: Path) -> None:
    """A logged time keeps a drill from being judged, unless it is not compared."""
    found = drill(tmp_path, "--flaw", "clock", num_strikes=1)
    assert found.verdict.word == result.NOT_JUDGED
    assert found.verdict.cause is not None
    assert found.verdict.cause.advice == ("--ignore 'seconds' ignores it.",)
    assert_exact(drill(tmp_path / "again", "--flaw", "clock", num_strikes=1, ignored=("sec*",)), NUM_BATCHES, 1)


@pytest.mark.slow
@pytest.mark.parametrize("flaw", ["threads", "not exact"])
def test_what_a_run_says_about_itself_is_named_first(tmp_path: Path, flaw: str) -> None:
    """Other surroundings, and an inexact restart, are the likely cause of a difference, otherwise a note."""
    part = {"threads": "surroundings", "not exact": "not restored exactly"}[flaw]
    found = drill(tmp_path, "--flaw", flaw, num_strikes=1)
    assert found.verdict.word == result.EXACT
    assert len(found.verdict.notes) == 1
    found = drill(tmp_path / "again", "--flaw", flaw, "--flaw", "weights", num_strikes=1)
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == part
    assert {"threads": "threads 2 and then 4", "not exact": "a generator that was not found"}[flaw] in (
        found.verdict.cause.text
    )


@pytest.mark.parametrize("kind", ["KILL", pytest.param("exception", marks=pytest.mark.slow)])
def test_without_progress_that_was_saved_no_strike_counts(tmp_path: Path, kind: str) -> None:
    """A run that saves nothing after its start can't prove anything, and the strikes that did not come are reported."""
    found = drill(tmp_path, "--every", "0", "--epochs", "1", kind=kind)
    assert found.verdict.word == result.NOT_JUDGED
    assert found.strikes == ()
    assert found.interrupted is not None
    assert (found.interrupted.num_processes == 1) == (kind == "KILL")  # an exception can't be waited for
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "too few autosaves"


@pytest.mark.parametrize("at", [(), (1, 4, 7)])
def test_a_short_script_that_saves_nothing_by_itself_gets_its_strikes(tmp_path: Path, at: tuple[int, ...]) -> None:
    """Processes of the script save before a due strike, and wait for it, nowhere else, and with --at exactly there."""
    found = drill(tmp_path, "--every", "0", "--epochs", "1", "--seconds", "0", "--heeds", num_strikes=3, at=at)
    assert_exact(found, 8, 3)
    for number, strike in enumerate(found.strikes):
        assert 0 < strike.resumed_at <= strike.at <= strike.resumed_at + 4
        assert not at or strike.at == strike.resumed_at == at[number]
    assert found.interrupted is not None
    # That of the start, one for each strike, that of the end.
    assert found.interrupted.num_autosaves == 5


@pytest.mark.parametrize("at", [(), (1, 7)])
def test_a_stop_needs_no_earlier_autosave(tmp_path: Path, at: tuple[int, ...]) -> None:
    """A process that is told to end saves by itself: the drill only lets it wait, and nothing is done twice."""
    found = drill(tmp_path, "--every", "0", "--epochs", "1", "--seconds", "0", "--heeds", kind="TERM", at=at)
    assert_exact(found, 8)
    assert [strike.num_twice for strike in found.strikes] == [0, 0]
    assert not at or tuple(strike.at for strike in found.strikes) == at


def test_more_strikes_than_batches_are_as_many_as_there_can_be(tmp_path: Path) -> None:
    """Each strike has to come after another batch, so the excess strikes can't come, and this is reported."""
    found = drill(
        tmp_path, "--every", "0", "--epochs", "1", "--batches", "4", "--seconds", "0", "--heeds", num_strikes=7
    )
    assert_exact(found, 4, 3)
    assert "Interrupted 3 times, by 3 of 7 strikes" in found.verdict.text


def test_a_script_that_fails_by_itself_is_not_judged(tmp_path: Path) -> None:
    """A failure without a strike says nothing about fault tolerance, and the output is available."""
    one = make(tmp_path, "--fails", "always")
    found = one.run()
    assert found.verdict.word == result.NOT_JUDGED
    assert "exit code 3" in found.verdict.text
    assert one.failed_output is not None
    assert "ValueError: it fails" in one.failed_output.read_text()


def test_a_script_that_can_not_be_run_again_did_not_resume(tmp_path: Path) -> None:
    """A restart that fails, unlike the uninterrupted run, is not fault tolerant."""
    one = make(tmp_path, "--fails", "again")
    found = one.run()
    assert found.verdict.word == result.NOT_RESUMED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "restart"
    assert one.failed_output is not None


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


def test_a_script_that_leaves_no_ledger_is_reported(tmp_path: Path) -> None:
    """If no training reports what it does, nothing can be compared."""
    found = drill(tmp_path, "--silent", "--epochs", "1")
    assert found.verdict.word == result.NOT_JUDGED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "no ledger"


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    """A run that does not end in time is killed and reported."""
    found = drill(tmp_path, "--seconds", "100", timeout_seconds=0.3)
    assert found.verdict.word == result.NOT_JUDGED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "timeout"


def test_the_words_of_the_command_tell_the_runs_apart(tmp_path: Path) -> None:
    """``{run}`` in the command becomes the name of the run."""
    drill(tmp_path, "--epochs", "1", num_strikes=1, command=words(tmp_path / "{run}"))
    assert {path.name for path in tmp_path.iterdir()} >= {"uninterrupted", "interrupted"}


def test_what_interrupts_a_drill_leaves_nothing_running(tmp_path: Path) -> None:
    """Whatever ends a drill ends its script, with all the processes it has started, and removes its autosaves."""

    class StopError(Exception):
        pass

    one = make(tmp_path, "--seconds", "0.05")

    def interrupt(_: object) -> None:
        if autosaves(tmp_path):
            raise StopError

    one.progress.update = interrupt  # type: ignore[method-assign]
    with pytest.raises(StopError):
        one.run()
    assert not any(str(tmp_path).encode() in line for line in command_lines())
    assert autosaves(tmp_path) == []


@pytest.mark.parametrize("is_used", [False, True])
def test_a_directory_for_autosaves_that_the_drill_has_caused_goes_with_them(tmp_path: Path, is_used: bool) -> None:
    """If a script names no directory, a drill leaves no empty one behind, and nothing of other runs is touched."""
    directory = tmp_path / "fault_tolerance"
    if is_used:
        (directory / "mine").mkdir(parents=True)
    drill(tmp_path, command=(*words(tmp_path)[:-1], str(directory), "--epochs=1"), num_strikes=1)
    assert directory.exists() == is_used
    assert not is_used or os.listdir(directory) == ["mine"]


def test_a_run_that_failed_before_its_first_autosave_leaves_nothing(tmp_path: Path) -> None:
    """The files of such a run beside the other run's autosaves are removed with them, and nothing else there."""
    for name in ("drill-t-interrupted-mine", "drill-other-interrupted"):
        (tmp_path / "autosaves" / name).mkdir(parents=True)
    found = drill(tmp_path, "--fails=again", token="t")
    assert found.verdict.word == result.NOT_RESUMED
    assert autosaves(tmp_path) == ["drill-other-interrupted"]


def test_what_interrupts_the_start_of_the_script_leaves_nothing_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C after the start of the script, before the start was recorded, still ends the script."""
    start = subprocess.Popen

    def interrupted(*arguments: Any, **options: Any) -> None:
        start(*arguments, **options).returncode = 0  # no code waits for it
        raise KeyboardInterrupt

    one = make(tmp_path, "--seconds", "100")
    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt):
        one.run()
    assert not any(str(tmp_path).encode() in line for line in command_lines())


def test_what_a_launcher_starts_again_is_told_from_the_next_fit(tmp_path: Path) -> None:
    """A fit in another process than the one before is a restart only if it had begun already."""
    settings = DrillSettings(command=("train",), directory=tmp_path, token="token")
    process = DrillProcess(settings, "interrupted", 0)

    def write(*lines: Line) -> None:
        for each in lines:
            append_line(process.ledger, each)
        process.read()

    write(begun(pid=1), *fit_lines(), begun(fit=2, pid=2))
    assert (process.progress.num_restarts, process.progress.last_ended, process.progress.num_expected) == (0, 1, 16)
    write(batch_line(0, 0, fit=2), begun(pid=3), resumed(2, 4, text="after the end of the fit"))
    write(line("end"), begun(fit=2, pid=4), resumed(0, 1, fit=2), batch_line(0, 1, fit=2))
    assert (process.progress.num_restarts, process.progress.last_ended) == (1, 1)
    batches = join(0, [[begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]]).batches
    before, after = stretches_of([process], BatchNumbers(batches))
    assert (before.start, before.done, after.start, after.done) == (0, 9, 9, 10)


def test_where_a_later_fit_begins_is_not_where_the_process_went_on(tmp_path: Path) -> None:
    """A second fit that the script starts from its own checkpoint says nothing about the restart."""
    settings = DrillSettings(command=("train",), directory=tmp_path, token="token")
    process = DrillProcess(settings, "interrupted", 1)
    lines = [begun(), resumed(0, 2), *fit_lines(start=(0, 2)), begun(fit=2), resumed(1, 0, fit=2)]
    for each in lines:
        append_line(process.ledger, each)
    batches = join(0, [[begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]]).batches
    [stretch] = stretches_of([process], BatchNumbers(batches))
    assert (stretch.start, stretch.done) == (2, 8)


def test_a_restart_is_shown_where_the_last_autosave_is_until_it_has_continued(tmp_path: Path) -> None:
    """Between the start of its fit and its resume, a restart does not look like a run that has begun again."""
    settings = DrillSettings(command=words(tmp_path), directory=tmp_path, token="t")
    runner = running.Runner(settings, ToldProgress(tmp_path))
    ran = runner._begin("interrupted", BatchNumbers(join(0, [[begun(), *fit_lines()]]).batches), None)
    shown = []
    for number, lines in enumerate([[begun(), *fit_lines()[:6], autosave_line(0, 2)], [begun(pid=2)], [resumed(0, 2)]]):
        process = DrillProcess(settings, ran.name, number)
        for each in lines:
            append_line(process.ledger, each)
        runner._look(process)
        shown.append(runner._status.done)
    assert shown == [3, 2, 2]


def test_a_moment_does_not_wait_longer_than_its_batch() -> None:
    """If a batch took long in the uninterrupted run only, the strike still comes before the next one is done."""
    clock = running.Clock(StrikeMoment(batch=1, fraction=0.9, hook=""), [1000.0] * 4)
    assert [clock.has_come(done, is_saved=True) for done in (1, 1, 2)] == [False, False, True]
    assert running.Clock(StrikeMoment(batch=1, fraction=0.0, hook=""), [1000.0] * 4).has_come(1, is_saved=True)
    waiting = running.Clock(StrikeMoment(batch=1, fraction=0.0, hook=""), [1000.0] * 4)
    assert [waiting.has_come(done, is_saved=done == 2) for done in (1, 2)] == [False, True]  # not before the autosave


def command_lines() -> list[bytes]:
    """Return the command lines of all processes on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            try:
                found.append((entry / "cmdline").read_bytes())
            except OSError:
                continue
    return found
