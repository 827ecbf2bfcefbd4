"""What a drill says of two runs: the verdict, the first difference, the likely cause, and what is printed of them."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.drill import causes, drilling, result, running
from lightning_faulttolerant.cli.drill.command import print_result
from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, first_mismatch
from lightning_faulttolerant.cli.drill.ledgers import RankOfRun, join
from lightning_faulttolerant.cli.drill.process import DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.result import PlainProgress, RichProgress, Status, progress_on
from lightning_faulttolerant.cli.drill.running import Ran
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line
from tests.cli.drill.made import (
    NUM_BATCHES,
    Change,
    MadeProcess,
    at,
    autosave_line,
    begun,
    changed,
    evaluated_line,
    evaluation_lines,
    fit_lines,
    line,
    resumed,
    since,
    strike,
    whole,
    whole_lines,
)

OTHER = (0.3).hex()
FIRST = [begun(), *fit_lines()[:7]]
ONCE = [begun(), *fit_lines()]


def second(*changes: Change, **surroundings: Any) -> list[Line]:
    """Return the lines of a process that resumes at batch 2."""
    lines = fit_lines(start=(0, 2))
    for change in changes:
        lines = changed(lines, change)
    return [begun(pid=2, **surroundings), resumed(0, 2), *lines]


def ended(*ranks: list[Line], **more: Any) -> MadeProcess:
    """Return a process that has ended well."""
    return MadeProcess(*ranks, exit_code=0, **more)


KILLED, EQUAL = MadeProcess(FIRST), ended(second())
DIFFERENT = ended(second(since(1, 0, loss=OTHER)))
WRONG_ONCE = MadeProcess([begun(), *changed(fit_lines()[:9], at(0, 3, loss=OTHER))])
THIRD = ended([begun(pid=3), resumed(0, 2), *fit_lines(start=(0, 2))])
CAUGHT = [begun(), *fit_lines()[:6], begun(fit=2), *fit_lines(fit=2)]
SKIPPED = [begun(), *changed(fit_lines(), since(1, 0, loss=OTHER))]
REFUSED = MadeProcess(
    [],
    exit_code=1,
    printed=[
        '  File "train.py", line 3, in <module>',
        "lightning_faulttolerant.errors.FingerprintMismatchError: The run that resumes is not the run that saved:",
        "  - batch_size: 4 saved, 8 now",
        "wandb: finished",
    ],
)
FAILED: dict[str, Any] = {"outcome": running.FAILED}
CATCHES: dict[str, Any] = {"outcome": running.DIFFERENT, "kind": "exception"}
SAVED = MadeProcess([*FIRST, autosave_line(0, 2)])

# What the processes of the interrupted run did, more about it, and the verdict, with the number of its difference.
JUDGED: dict[str, tuple[Sequence[MadeProcess], dict[str, Any], str, int | None]] = {
    "equal": ([KILLED, EQUAL], {}, result.EXACT, None),
    "not all values compared": ([KILLED, EQUAL], {"ignored": ("l*",)}, result.EXACT, None),
    "wrong before any strike": ([WRONG_ONCE, EQUAL], {}, result.NOT_JUDGED, 3),
    "wrong in a part that ran again": (
        [KILLED, MadeProcess(second(at(0, 3, loss=OTHER))[:8]), THIRD],
        {},
        result.DIFFERS,
        3,
    ),
    "different": ([KILLED, DIFFERENT], {}, result.DIFFERS, 4),
    "different, and checked": ([KILLED, DIFFERENT], {"is_checked": True}, result.DIFFERS, 4),
    "different after a launcher's restart": (
        [ended(FIRST + second(since(1, 0, loss=OTHER)), num_restarts=1)],
        {},
        result.DIFFERS,
        4,
    ),
    "equal after a launcher's restart": ([ended(FIRST + second(), num_restarts=1)], {}, result.EXACT, None),
    "a launcher's restart fails": ([MadeProcess(FIRST, exit_code=1, num_restarts=1)], FAILED, result.NOT_RESUMED, None),
    "fails by itself": ([MadeProcess(FIRST, exit_code=1)], FAILED, result.NOT_JUDGED, None),
    "fails the second time": ([MadeProcess([], exit_code=1)], FAILED, result.NOT_JUDGED, None),
    "ends early unstruck": ([ended([begun(), *fit_lines()[:9]])], {}, result.NOT_JUDGED, 4),
    "catches the exception": ([ended(CAUGHT, fault="1:0:3:start")], CATCHES, result.NOT_JUDGED, None),
    "catches it in a step": ([ended(SKIPPED, fault="1:0:3:step")], CATCHES, result.NOT_JUDGED, None),
    "differs before the exception": ([ended(SKIPPED, fault="1:1:2:step")], CATCHES, result.NOT_JUDGED, 4),
    "another course": ([ended(CAUGHT)], CATCHES, result.NOT_JUDGED, 3),
    "stopped well": ([KILLED, EQUAL], {"kind": "TERM", "exit_code": 143}, result.EXACT, None),
    "the shell keeps the SIGTERM": ([KILLED, EQUAL], {"kind": "TERM", "exit_code": -15}, result.EXACT, None),
    "a rank too many": ([MadeProcess(FIRST, FIRST), ended(second(), second())], {}, result.NOT_JUDGED, 0),
    "a rank too many later": ([KILLED, ended(second(), second())], {}, result.NOT_JUDGED, 0),
    "other surroundings": ([KILLED, ended(second(threads=4))], {}, result.EXACT, None),
    "different in other surroundings": (
        [KILLED, ended(second(since(1, 0, loss=OTHER), threads=4))],
        {},
        result.DIFFERS,
        4,
    ),
    "restart fails": ([KILLED, MadeProcess([], exit_code=1)], FAILED, result.NOT_RESUMED, None),
    "begins again": ([KILLED, KILLED], {"outcome": running.BEGAN_AGAIN}, result.NOT_RESUMED, None),
    "resumes another run": ([KILLED], {"outcome": running.RESUMED}, result.NOT_JUDGED, None),
    "takes too long": ([KILLED], {"outcome": running.TIMED_OUT}, result.NOT_JUDGED, None),
    "does not stop": ([KILLED], {"outcome": running.NOT_STOPPED}, result.NOT_JUDGED, None),
    "refused": ([KILLED, REFUSED], FAILED, result.NOT_RESUMED, None),
    "fewer strikes": ([KILLED, EQUAL], {"num_wanted": 3}, result.EXACT, None),
    "no autosaves": ([KILLED, EQUAL], {"is_struck": False}, result.NOT_JUDGED, None),
    "too few autosaves": ([SAVED, EQUAL], {"is_struck": False}, result.NOT_JUDGED, None),
    "an exception too early": ([SAVED, EQUAL], {"is_struck": False, "kind": "exception"}, result.NOT_JUDGED, None),
}


def judge(
    processes: Sequence[MadeProcess],
    *,
    outcome: str = running.ENDED,
    num_wanted: int = 1,
    exit_code: int = -9,
    is_struck: bool = True,
    **settings: Any,
) -> result.DrillResult:
    """Judge an interrupted run of these processes."""
    ran = Ran(name="interrupted", outcome=outcome, processes=cast("list[DrillProcess]", list(processes)))
    made = DrillSettings(command=("train",), directory=Path(), token="t", **settings)
    strikes = [strike(2, exit_code=exit_code)] if is_struck else []
    verdict = drilling.of_interrupted(whole(), ran, strikes, made, num_wanted=num_wanted)
    return drill_result(verdict, strikes=strikes, num_wanted=num_wanted, kind=made.kind)


def drill_result(verdict: result.DrillVerdict, **more: Any) -> result.DrillResult:
    """Return a drill with this verdict."""
    own: dict[str, Any] = {"strikes": (), "num_wanted": 1, "kind": "KILL", **more}
    words = ("python", "train.py")
    return result.DrillResult(command=words, verdict=verdict, seed=1, began=0, seconds=1, directory="/tmp/d", **own)


def printed(found: result.DrillResult, stream: io.StringIO | None = None) -> str:
    """Return the printed text of the drill."""
    stream = stream or io.StringIO()
    print_result(found, stream, is_kept=True)
    return stream.getvalue()


@pytest.mark.parametrize("case", JUDGED)
def test_an_interrupted_run_is_judged(case: str, snapshot: SnapshotAssertion) -> None:
    """Each case has its verdict, its exit code, and a text with the cause that fits a terminal."""
    processes, more, word, number = JUDGED[case]
    found = judge(processes, **more)
    difference = found.verdict.difference
    assert (found.verdict.word, None if difference is None else difference.number) == (word, number)
    text = printed(found)
    assert max(map(len, text.splitlines())) <= 80
    assert f"exit code {found.verdict.exit_code}\n{text}" == snapshot


def test_a_rank_that_was_struck_at_its_end_is_compared_as_far_as_it_came() -> None:
    """If rank 0 has ended, another rank that a strike hit may lack its last line, but its other lines must be right."""
    expected = [join(rank, [ONCE]) for rank in range(2)]
    made = DrillSettings(command=("train",), directory=Path(), token="t")
    for last, number in ((second()[:-1], None), (second(at(1, 3, loss=OTHER))[:-1], 7)):
        processes = cast("list[DrillProcess]", [MadeProcess(FIRST, FIRST), MadeProcess(second(), last)])
        ran = Ran(name="interrupted", processes=processes, is_cut=True)
        verdict = drilling.of_interrupted(expected, ran, [strike(2)], made, num_wanted=1)
        found = None if verdict.difference is None else verdict.difference.number
        assert (verdict.word, found) == (result.EXACT if number is None else result.DIFFERS, number)


def test_runs_that_were_left_alone_are_judged_too(snapshot: SnapshotAssertion) -> None:
    """One that fails the first time, the second time, or is refused, and several trainings that write one ledger."""
    failing, twice = MadeProcess([], exit_code=1), ended([*ONCE, begun(pid=2), *fit_lines()])
    next_fit = ended([*ONCE, begun(fit=2, pid=2), *fit_lines(fit=2)])
    texts = []
    for name, outcome, process in (
        (result.UNINTERRUPTED, running.FAILED, failing),
        (result.REPEATED, running.FAILED, failing),
        (result.UNINTERRUPTED, running.FAILED, REFUSED),
        (result.UNINTERRUPTED, running.ENDED, twice),
    ):
        ran = Ran(name=name, outcome=outcome, processes=cast("list[DrillProcess]", [process]))
        verdict = drilling.of_uninterrupted(ran, ran.ranks())
        assert verdict is not None
        assert verdict.word == result.NOT_JUDGED
        texts.append(printed(drill_result(verdict)))
    assert "\n".join(texts) == snapshot
    ran = Ran(name=result.UNINTERRUPTED, outcome=running.ENDED, processes=cast("list[DrillProcess]", [next_fit]))
    assert drilling.of_uninterrupted(ran, ran.ranks()) is None


def test_a_fault_of_the_drill_is_no_refusal() -> None:
    """An exception that a drill itself raised is not a refusal of the package; a rank may precede the message."""
    assert drilling.refusal_in(["lightning_faulttolerant.errors.DrillFault: asked for"]) is None
    assert drilling.refusal_in(["[rank1]: lightning_faulttolerant.errors.NotExactError: why"]) == "NotExactError: why"
    assert drilling.refusal_in(["ValueError: it fails"]) is None


# Causes.


def without(event: str, epoch: int) -> Change:
    """Leave out the lines of a kind and an epoch."""
    return lambda found: None if (found["event"], found.get("epoch")) == (event, epoch) else found


def end(**values: Any) -> Change:
    """Change the line of the end."""
    return lambda found: {**found, **values} if found["event"] == ledger.END else found


def of_test(event: str, number: int | None = None, **values: Any) -> Change:
    """Change the lines of a kind in the test, or the one of a batch; without values, leave them out."""

    def change(found: Line) -> Line | None:
        is_meant = (found["event"], found["fit"]) == (event, 2)
        if is_meant and number in (None, found.get("validation_batch")):
            return {**found, **values} if values else None
        return found

    return change


def in_validation(found: Line) -> Line:
    """Change what the second batch of the validation run returns."""
    return {**found, "output": OTHER} if (found["fit"], found.get("validation_batch")) == (1, 2) else found


VALIDATED: dict[str, Any] = {"metrics": {"accuracy": OTHER}}
# Of a run that is struck, or of a script that evaluates.
CAUSES: dict[str, tuple[str, list[Change]]] = {
    "other samples": ("data order", [since(0, 3, order="x", content="x", loss=OTHER)]),
    "other samples, and the generators": ("data order", [since(0, 3, order="x", content="x", rng="x")]),
    "no order is known": ("augmentation", [since(0, 0, order=None), since(0, 3, content="x")]),
    "another content of the same samples": ("augmentation", [since(0, 3, content="x", loss=OTHER)]),
    "another content, and the generators": ("augmentation", [since(0, 3, content="x", rng="x")]),
    "generators": ("main RNG", [since(0, 3, rng="x", loss=OTHER)]),
    "loss": ("weights", [since(0, 3, loss=OTHER)]),
    "loss and learning rate": ("weights", [since(0, 3, loss=OTHER, learning_rates=[[OTHER]])]),
    "learning rate": ("learning rates", [since(0, 3, learning_rates=[[OTHER]])]),
    "validation, then all is equal": ("metrics", [at(0, 4, ledger.VALIDATED, **VALIDATED)]),
    "validation at the end, weights equal": ("metrics", [at(1, 4, ledger.VALIDATED, **VALIDATED)]),
    "validation, then losses": ("weights", [at(0, 4, ledger.VALIDATED, **VALIDATED), since(1, 0, loss=OTHER)]),
    "logged": ("logged values", [at(0, 3, ledger.LOG, metrics={"seconds": OTHER})]),
    "logged in a step that differs": (
        "data order",
        [at(0, 3, ledger.LOG, metrics={"loss": OTHER}), since(0, 3, order="x")],
    ),
    "weights at the end": ("weights", [end(weights="x")]),
    "optimizers at the end": ("optimizers", [end(optimizers="x")]),
    "metrics at the end": ("metrics", [end(metrics={"accuracy": OTHER})]),
    "generators at the end": ("main RNG", [end(rng="x")]),
    "no validation run": ("course of the run", [without(ledger.VALIDATED, 0)]),
    "no second epoch": ("course of the run", [without(ledger.BATCH, 1)]),
    "test: other data": ("augmentation", [of_test("evaluated", 3, content="x")]),
    "test: generators": ("main RNG", [of_test("evaluated", 3, rng="x")]),
    "test: output": ("weights", [of_test("evaluated", 3, output=OTHER)]),
    "test: lost": ("course of the run", [of_test("evaluated", 3)]),
    "test: repeated": ("course of the run", [of_test("evaluated", 3, validation_batch=2)]),
    "test: returned": ("returned results", [of_test("end", returned={"accuracy": OTHER})]),
    "test: in the validation run": ("weights", [in_validation]),
}


def changed_run(expected: list[Line], changes: Sequence[Change]) -> Mismatch:
    """Return the first difference of a run, and of one with these changes that was struck before them."""
    found = expected[1:]
    for change in changes:
        found = changed(found, change)
    mismatch = first_mismatch([join(0, [expected])], [join(0, [[expected[0], *found]])])
    assert mismatch is not None
    return mismatch


@pytest.mark.parametrize("case", CAUSES)
def test_the_first_difference_and_its_cause_are_named(case: str, snapshot: SnapshotAssertion) -> None:
    """The place, what differs with both values, what is equal, and the part of the state that causes it."""
    part, changes = CAUSES[case]
    expected = whole_lines() if case.startswith("test: ") else ONCE
    if case == "no order is known":
        expected, changes = [expected[0], *changed(expected[1:], changes[0])], changes[1:]
    mismatch = changed_run(expected, changes)
    cause, difference = causes.cause_of(mismatch), difference_of(mismatch)
    assert cause.part == part
    values = [f"{value.name}: {value.expected}, {value.found}" for value in difference.values]
    equal = f"equal: {', '.join(difference.equal)}; {difference.num_equal} {difference.num_evaluated_equal}"
    assert "\n".join([difference.place, *values, equal, cause.text, *cause.advice]) == snapshot


NOT_DETERMINISTIC: dict[str, tuple[str, list[Change]]] = {
    "no seed": ("no seed", [since(0, 0, rng="x", order="x", content="x", loss=OTHER)]),
    "order": ("data order", [since(0, 1, order="x", content="x")]),
    "content": ("augmentation", [since(0, 0, content="x", loss=OTHER)]),
    "initial weights": ("weights", [since(0, 0, loss=OTHER)]),
    "kernels": ("kernels", [since(0, 2, loss=OTHER)]),
    "a clock that is logged": ("logged values", [at(0, 1, ledger.LOG, metrics={"seconds": OTHER})]),
    "a monitor's columns": (
        "logged values",
        [
            at(
                0,
                1,
                ledger.LOG,
                metrics={
                    "DeviceStatsMonitor.on_train_batch_start/cpu_percent": OTHER,
                    "DeviceStatsMonitor.on_train_batch_end/cpu_percent": OTHER,
                    "seconds": OTHER,
                },
            )
        ],
    ),
    "something else": ("course of the run", [without(ledger.VALIDATED, 0)]),
}


@pytest.mark.parametrize("case", NOT_DETERMINISTIC)
def test_why_a_script_is_not_deterministic_is_named(case: str, snapshot: SnapshotAssertion) -> None:
    """The first difference between two uninterrupted runs names the reason and the remedy."""
    part, changes = NOT_DETERMINISTIC[case]
    cause = causes.not_deterministic(changed_run(ONCE, changes), "there")
    assert cause.part == part
    assert "\n".join([cause.text, *cause.advice]) == snapshot


def test_the_earliest_difference_of_all_ranks_counts() -> None:
    """If several ranks differ, the one with the fewest batches before it counts; a missing rank differs."""
    expected = [join(rank, [ONCE]) for rank in range(3)]
    found = [
        join(0, [[begun(), *changed(fit_lines(), since(1, 0, loss=OTHER))]]),
        join(1, [[begun(), *changed(fit_lines(), since(0, 1, content="x"))]]),
        join(2, [ONCE]),
    ]
    for ranks, place in ((found, (1, 1)), (expected[:2], (2, 0))):
        mismatch = first_mismatch(expected, ranks)
        assert mismatch is not None
        assert (mismatch.rank, mismatch.number) == place


def test_an_end_that_is_not_there_and_only_an_evaluation() -> None:
    """The missing event is shown against nothing; what of an evaluation was equal is named alone."""
    mismatch = first_mismatch(whole(), [join(0, [ONCE[:-1]])])
    assert mismatch is not None
    [value] = difference_of(mismatch).values
    assert (value.expected, value.found) == ("the end of the fit", "nothing, the run had ended")
    batches = [evaluated_line(number) for number in range(1, NUM_BATCHES + 1)]
    lines = [begun(function="predict"), *batches, line(ledger.END, fit=1, metrics={}, rng="rng")]
    again = [begun(function="predict", pid=2), resumed(0, 0, validation_batch=2), *lines[3:]]
    ran = Ran(name="interrupted", processes=cast("list[DrillProcess]", [MadeProcess(lines[:4]), ended(again)]))
    made = DrillSettings(command=("train",), directory=Path(), token="t")
    verdict = drilling.of_interrupted([join(0, [lines])], ran, [strike(2)], made, num_wanted=1)
    assert (verdict.word, "4 evaluation batches are bit for bit" in verdict.text) == (result.EXACT, True)


def test_logged_values_can_be_passed_over() -> None:
    """Values with given names, or names that match a pattern, are not compared; others in the same line are."""

    def timed(time: float, loss: float) -> RankOfRun:
        log = line(ledger.LOG, epoch=0, batch=1, step=0, metrics={"time/step": time, "loss": loss})
        alone = line(ledger.LOG, epoch=0, batch=1, step=0, metrics={"time/step": time})
        return join(0, [[begun(), log, alone] if time < 2 else [begun(), log]])

    one, other = timed(1.0, 3.0), timed(2.0, 3.0)
    assert first_mismatch([one], [other], ignored=["time/*"]) is None
    for found, ignored in ((other, []), (other, ["loss"]), (timed(2.0, 4.0), ["time/*"])):
        assert first_mismatch([one], [found], ignored=ignored) is not None


def test_calls_of_one_function_are_counted_by_themselves() -> None:
    """The second test is test 2 and the second fit is fit 2, whatever else the script has called."""
    lines = [*ONCE, begun(fit=2, function="test"), *evaluation_lines(), begun(fit=3), *fit_lines(fit=3)]
    lines += [begun(fit=4, function="test"), *evaluation_lines(fit=4)]
    events = join(0, [lines]).events
    found = {str(event) for event in events if event.kind in (ledger.BATCH, ledger.EVALUATED)}
    assert {"batch 3 of epoch 1", "batch 3 of epoch 1 of fit 2", "batch 3 of test", "batch 3 of test 2"} <= found


# The terminal.


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def test_the_verdict_has_a_color_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe, or with NO_COLOR set, no control character for a terminal is written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    exact = judge([KILLED, EQUAL])
    assert "\x1b[1;32mEXACT" in printed(exact, Terminal())
    assert "\x1b" not in printed(exact)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(exact, Terminal())


def test_progress_is_plain_where_no_lines_can_move(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """On a terminal, lines move; elsewhere, one comes when a run begins and ends, and every ten seconds."""
    for stream, terminal, kind in (
        (Terminal(), "xterm", RichProgress),
        (io.StringIO(), "xterm", PlainProgress),
        (Terminal(), "dumb", PlainProgress),
        (Terminal(), "unknown", PlainProgress),
    ):
        monkeypatch.setenv("TERM", terminal)
        with progress_on(stream) as progress:
            assert isinstance(progress, kind)
    clock = iter([0.0, 1.0, 12.0, 13.0])
    monkeypatch.setattr(result, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    plain = PlainProgress(stream)
    for done in range(4):
        plain.update(Status(run="interrupted", done=done, num_batches=9, num_wanted=2, saved=1))
    plain.end(Status(run="interrupted", done=9, num_strikes=2, num_wanted=2), 75.0)
    assert stream.getvalue() == snapshot
