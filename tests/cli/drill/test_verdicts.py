from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_faulttolerant.cli.drill import drilling, result, running
from lightning_faulttolerant.cli.drill.drilling import refusal_in
from lightning_faulttolerant.cli.drill.ledgers import join
from lightning_faulttolerant.cli.drill.process import DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.result import DrillVerdict
from lightning_faulttolerant.cli.drill.running import Ran
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line
from tests.cli.drill.made import (
    MadeProcess,
    at,
    autosave_line,
    begun,
    changed,
    evaluated_line,
    fit_lines,
    line,
    resumed,
    since,
    strike,
    whole,
)

OTHER = (0.3).hex()


def judge(
    processes: Sequence[MadeProcess],
    *,
    outcome: str = running.ENDED,
    num_wanted: int = 1,
    exit_code: int = -9,
    is_struck: bool = True,
    **settings: Any,
) -> DrillVerdict:
    """Judge an interrupted run of these processes."""
    ran = Ran(name="interrupted", outcome=outcome, processes=cast("list[DrillProcess]", list(processes)))
    made = DrillSettings(command=("train",), directory=Path(), token="t", **settings)
    strikes = [strike(2, exit_code=exit_code)] if is_struck else []
    return drilling.of_interrupted(whole(), ran, strikes, made, num_wanted=num_wanted)


def second(*changes: Any, **surroundings: Any) -> list[Line]:
    """Return the lines of a process that resumes at batch 2."""
    lines = fit_lines(start=(0, 2))
    for change in changes:
        lines = changed(lines, change)
    return [begun(pid=2, **surroundings), resumed(0, 2), *lines]


FIRST = [begun(), *fit_lines()[:7]]


def test_equal_runs_are_exact() -> None:
    """The verdict says what was compared."""
    verdict = judge([MadeProcess(FIRST), MadeProcess(second(), exit_code=0)])
    assert (verdict.word, verdict.exit_code) == (result.EXACT, 0)
    assert "8 batches, 2 validation runs, 12 logged values, and the final weights" in verdict.text
    verdict = judge([MadeProcess(FIRST), MadeProcess(second(), exit_code=0)], ignored=("l*",))
    assert "2 validation runs, 2 logged values, and the final weights" in verdict.text
    assert verdict.notes == ("Not compared (--ignore): l*.",)


def test_a_single_kind_of_thing_is_named_alone() -> None:
    """An evaluation that returns nothing has only its batches to compare."""
    batches = [evaluated_line(number) for number in (1, 2, 3, 4)]
    end = line(ledger.END, fit=1, metrics={}, rng="rng")
    run = join(0, [[begun(function="predict"), *batches, end]])
    assert drilling._what_is_same([run], ()) == "4 evaluation batches"


def test_what_is_dropped_for_being_done_again_is_compared_too() -> None:
    """A wrong batch of a killed process is found, even if the next process did it right."""
    killed = [begun(), *changed(fit_lines()[:9], at(0, 3, loss=OTHER))]
    verdict = judge([MadeProcess(killed), MadeProcess(second(), exit_code=0)])
    assert verdict.word == result.NOT_JUDGED  # no strike had come yet
    assert verdict.difference is not None
    assert verdict.difference.number == 3
    third = [begun(pid=3), resumed(0, 2), *fit_lines(start=(0, 2))]
    processes = [
        MadeProcess(FIRST),
        MadeProcess(second(at(0, 3, loss=OTHER))[:8]),
        MadeProcess(third, exit_code=0),
    ]
    verdict = judge(processes)
    assert verdict.word == result.DIFFERS
    assert verdict.difference is not None
    assert (verdict.difference.number, verdict.difference.process) == (3, 1)


def test_a_difference_after_a_restart_by_a_launcher_is_one_of_the_interrupted_run() -> None:
    """A process of the drill with restarted ranks has been interrupted, so the script is not to blame."""
    verdict = judge([MadeProcess(FIRST + second(since(1, 0, loss=OTHER)), exit_code=0, num_restarts=1)])
    assert verdict.word == result.DIFFERS
    assert verdict.difference is not None
    assert verdict.difference.number == 4
    verdict = judge([MadeProcess(FIRST + second(), exit_code=0, num_restarts=1)])
    assert verdict.word == result.EXACT


def test_a_restart_by_a_launcher_that_fails_is_a_restart() -> None:
    """Ranks that can't be restarted are distinguished from a script that fails by itself."""
    verdict = judge([MadeProcess(FIRST, exit_code=1, num_restarts=1)], outcome=running.FAILED)
    assert verdict.word == result.NOT_RESUMED
    verdict = judge([MadeProcess(FIRST, exit_code=1)], outcome=running.FAILED)
    assert verdict.word == result.NOT_JUDGED


def test_a_run_that_ends_early_though_nobody_has_struck_is_not_judged() -> None:
    """An early end before any restart is not held against one, even if no difference can be named."""
    verdict = judge([MadeProcess([begun(), *fit_lines()[:9]], exit_code=0)])
    assert verdict.word == result.NOT_JUDGED
    assert verdict.difference is not None
    assert verdict.difference.values[0].found == "nothing, the run had ended"


def test_an_exception_that_the_script_catches_is_no_flaw() -> None:
    """A script that fits again in the process that was struck is deterministic, but proves nothing about a restart."""
    again = [begun(), *fit_lines()[:6], begun(fit=2), *fit_lines(fit=2)]
    skipped = [begun(), *changed(fit_lines(), since(1, 0, loss=OTHER))]
    for lines, fault, cause in (
        (again, "1:0:3:start", "caught exception"),
        (skipped, "1:0:3:step", "caught exception"),
        (skipped, "1:1:2:step", "kernels"),  # it differs before that
        (again, "", "course of the run"),
    ):
        processes = [MadeProcess(lines, exit_code=0, fault=fault)]
        verdict = judge(processes, outcome=running.DIFFERENT, kind="exception")
        assert verdict.word == result.NOT_JUDGED
        assert verdict.cause is not None
        assert verdict.cause.part == cause


@pytest.mark.parametrize(("exit_code", "num_notes"), [(143, 0), (1, 0), (-15, 1)])
def test_a_command_that_keeps_a_sigterm_for_itself_is_reported(exit_code: int, num_notes: int) -> None:
    """If a shell dies of SIGTERM, the training was killed, not told to end: exact, but not the intended proof."""
    verdict = judge([MadeProcess(FIRST), MadeProcess(second(), exit_code=0)], exit_code=exit_code, kind="TERM")
    assert (verdict.word, len(verdict.notes)) == (result.EXACT, num_notes)


def test_a_rank_too_many_is_no_equal_run() -> None:
    """All ranks of both runs are compared, also one that only the interrupted run has."""
    processes = [MadeProcess(FIRST, FIRST), MadeProcess(second(), second(), exit_code=0)]
    assert judge(processes).word == result.NOT_JUDGED
    processes = [MadeProcess(FIRST), MadeProcess(second(), second(), exit_code=0)]
    assert judge(processes).word != result.EXACT


def test_a_rank_that_was_struck_at_its_end_is_compared_as_far_as_it_came() -> None:
    """If rank 0 has ended, another rank that a strike hit may lack its last line, but its other lines must be right."""
    expected = [join(rank, [[begun(), *fit_lines()]]) for rank in range(2)]
    made = DrillSettings(command=("train",), directory=Path(), token="t")
    for last, number in ((second()[:-1], None), (second(at(1, 3, loss=OTHER))[:-1], 7)):
        processes = cast("list[DrillProcess]", [MadeProcess(FIRST, FIRST), MadeProcess(second(), last)])
        ran = Ran(name="interrupted", processes=processes, is_cut=True)
        verdict = drilling.of_interrupted(expected, ran, [strike(2)], made, num_wanted=1)
        found = None if verdict.difference is None else verdict.difference.number
        assert (verdict.word, found) == (result.EXACT if number is None else result.DIFFERS, number)


def test_a_script_that_fails_only_the_second_time_is_not_one_that_fails_by_itself() -> None:
    """The remains of the first run block the second, and the advice says how to keep the two apart."""
    parts = []
    for name in (result.UNINTERRUPTED, result.REPEATED):
        process = cast("list[DrillProcess]", [MadeProcess([], exit_code=1)])
        verdict = drilling.of_uninterrupted(Ran(name=name, outcome=running.FAILED, processes=process), [])
        assert verdict is not None
        assert verdict.cause is not None
        parts.append(verdict.cause.part)
    verdict = judge([MadeProcess([], exit_code=1)], outcome=running.FAILED)
    assert verdict.cause is not None
    assert [*parts, verdict.cause.part] == ["script", "second run", "second run"]
    assert "{run}" in verdict.cause.advice[1]


def test_several_trainings_that_write_one_ledger_are_not_compared() -> None:
    """If a second process begins the same fit, the first one's batches would not be compared at all."""
    lines = [begun(), *fit_lines(), begun(pid=2), *fit_lines()]
    ran = Ran(name="uninterrupted", processes=cast("list[DrillProcess]", [MadeProcess(lines, exit_code=0)]))
    verdict = drilling.of_uninterrupted(ran, ran.ranks())
    assert verdict is not None
    assert verdict.word == result.NOT_JUDGED
    assert verdict.cause is not None
    assert verdict.cause.part == "several trainings"
    lines = [begun(), *fit_lines(), begun(fit=2, pid=2), *fit_lines(fit=2)]
    ran = Ran(name="uninterrupted", processes=cast("list[DrillProcess]", [MadeProcess(lines, exit_code=0)]))
    assert drilling.of_uninterrupted(ran, ran.ranks()) is None


def test_other_surroundings_are_the_likely_cause() -> None:
    """A different number of threads comes before the cause in the events, which becomes a note, as in equal runs."""
    verdict = judge([MadeProcess(FIRST), MadeProcess(second(since(1, 0, loss=OTHER), threads=4), exit_code=0)])
    assert verdict.cause is not None
    assert verdict.cause.part == "surroundings"
    assert "threads 2 and then 4" in verdict.cause.text
    assert any("weights" in note for note in verdict.notes)
    verdict = judge([MadeProcess(FIRST), MadeProcess(second(threads=4), exit_code=0)])
    assert verdict.word == result.EXACT
    assert "threads 2 and then 4" in verdict.notes[0]


@pytest.mark.parametrize(("is_checked", "num_notes"), [(True, 0), (False, 1)])
def test_check_is_suggested_where_it_was_not_done(is_checked: bool, num_notes: int) -> None:
    """A script that was checked needs no such hint."""
    processes = [MadeProcess(FIRST), MadeProcess(second(since(1, 0, loss=OTHER)), exit_code=0)]
    assert len(judge(processes, is_checked=is_checked).notes) == num_notes


@pytest.mark.parametrize(
    ("outcome", "word", "part"),
    [
        (running.FAILED, result.NOT_RESUMED, "restart"),
        (running.BEGAN_AGAIN, result.NOT_RESUMED, "not resumed"),
        (running.RESUMED, result.NOT_JUDGED, "existing run"),
        (running.TIMED_OUT, result.NOT_JUDGED, "timeout"),
        (running.NOT_STOPPED, result.NOT_JUDGED, "stop"),
    ],
)
def test_a_run_that_did_not_come_to_its_end_is_judged_by_how_it_ended(outcome: str, word: str, part: str) -> None:
    """Each way to end has a verdict, a cause, and advice."""
    verdict = judge([MadeProcess(FIRST), MadeProcess([], exit_code=1)], outcome=outcome)
    assert verdict.word == word
    assert verdict.cause is not None
    assert verdict.cause.part == part
    assert verdict.cause.advice


def test_strikes_that_came_are_a_verdict() -> None:
    """Fewer strikes than requested are exact, with their number, and none at all prove nothing."""
    run = [MadeProcess(FIRST), MadeProcess(second(), exit_code=0)]
    verdict = judge(run, num_wanted=3)
    assert (verdict.word, verdict.exit_code) == (result.EXACT, 0)
    assert verdict.text.startswith("Interrupted once, by 1 of 3 strikes, and 8 batches")
    verdict = judge(run, num_wanted=3, is_struck=False)
    assert (verdict.word, verdict.exit_code) == (result.NOT_JUDGED, 2)
    assert verdict.text.startswith("No strike came.")


REFUSAL = [
    "Traceback (most recent call last):",
    '  File "train.py", line 3, in <module>',
    "lightning_faulttolerant.errors.FingerprintMismatchError: The run that resumes is not the run that saved:",
    "  - batch_size: 4 saved, 8 now",
    "wandb: finished",
]


def test_a_refusal_is_told_with_its_message() -> None:
    """If this package has ended a restart, or the first run, the verdict is its message."""
    message = "FingerprintMismatchError: The run that resumes is not the run that saved: - batch_size: 4 saved, 8 now"
    verdict = judge([MadeProcess(FIRST), MadeProcess([], exit_code=1, printed=REFUSAL)], outcome=running.FAILED)
    assert (verdict.word, verdict.text) == (result.NOT_RESUMED, "lightning_faulttolerant refused to resume the run.")
    assert verdict.exit_code == 1
    assert verdict.cause is not None
    assert (verdict.cause.part, verdict.cause.text) == ("refusal", message)
    assert "Training did not differ" in verdict.cause.advice[1]
    process = cast("DrillProcess", MadeProcess([], exit_code=1, printed=REFUSAL))
    first = drilling.failed(process, run=result.UNINTERRUPTED, is_restart=False)
    assert (first.word, first.text) == (result.NOT_JUDGED, "lightning_faulttolerant refuses this script.")
    assert first.cause is not None
    assert first.cause.text == message
    assert "no training to resume" in first.cause.advice[1]


def test_a_fault_of_the_drill_is_no_refusal() -> None:
    """An exception that a drill itself raised is not a refusal of the package; a rank may precede the message."""
    assert refusal_in(["lightning_faulttolerant.errors.DrillFault: asked for"]) is None
    assert refusal_in(["[rank1]: lightning_faulttolerant.errors.NotExactError: why"]) == "NotExactError: why"
    assert refusal_in(["ValueError: it fails"]) is None


@pytest.mark.parametrize(("first", "part"), [([], "no autosaves"), ([autosave_line(0, 2)], "too few autosaves")])
def test_a_run_without_any_autosave_is_told_what_switches_them_off(first: list[Line], part: str) -> None:
    """More frequent saves do not help if there are no autosaves."""
    verdict = judge([MadeProcess([*FIRST, *first]), MadeProcess(second(), exit_code=0)], is_struck=False)
    assert verdict.cause is not None
    assert verdict.cause.part == part


@pytest.mark.parametrize(
    ("kind", "text"),
    [("KILL", "It asks each process"), ("exception", "only if an autosave with progress came before it")],
)
def test_what_a_strike_needs_depends_on_its_kind(kind: str, text: str) -> None:
    """Only an exception does not wait for an autosave, so it may come too early to count."""
    first = [*FIRST, autosave_line(0, 2)]
    verdict = judge([MadeProcess(first), MadeProcess(second(), exit_code=0)], is_struck=False, kind=kind)
    assert verdict.cause is not None
    assert text in verdict.cause.text
