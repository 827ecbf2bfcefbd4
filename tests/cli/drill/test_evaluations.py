"""Validation runs and evaluations in a drill: where they are struck, and how their batches are joined and compared."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_faulttolerant.cli.drill import causes, result
from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, first_mismatch
from lightning_faulttolerant.cli.drill.ledgers import STAGES, BatchNumbers, join, place_before
from lightning_faulttolerant.cli.drill.process import DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.result import DrillResult
from lightning_faulttolerant.cli.drill.strikes import (
    StrikeMoment,
    moments_of,
    moved,
    plan_of,
    postponed,
    stretches_of,
    strikes_of,
)
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line
from tests.cli.drill.drills import drill, make
from tests.cli.drill.made import (
    NUM_BATCHES,
    Change,
    StruckProcess,
    autosave_line,
    batch_line,
    begun,
    changed,
    evaluated_line,
    evaluation_lines,
    fit_lines,
    line,
    log_line,
    resumed,
)

OTHER = (0.3).hex()
TEST = begun(fit=2, function="test")


def validated_lines() -> list[Line]:
    """Return the lines of a fit of two batches, a validation run of three, and one more batch."""
    run = [evaluated_line(number, batch=2) for number in (1, 2, 3)]
    logged = [log_line(0, 2, validating=True, validation_batch=number) for number in (1, 2, 3)]
    result = line(ledger.VALIDATED, epoch=0, batch=2, metrics={"accuracy": OTHER})
    validation = [event for pair in zip(run, logged, strict=True) for event in pair]
    return [batch_line(0, 0), batch_line(0, 1), *validation, result, batch_line(0, 2)]


def whole_lines() -> list[Line]:
    """Return the lines of a script that fits, validating in the middle, and tests."""
    end = line(ledger.END, weights="weights", optimizers="optimizers", metrics={}, rng="rng")
    return [begun(), *validated_lines(), end, TEST, *evaluation_lines()]


NUMBERS = BatchNumbers(join(0, [whole_lines()]).steps)
"""Two training batches, three of validation, one of training, four of test."""


@pytest.mark.parametrize("num_validated", range(4))
def test_a_validation_run_that_continues_joins_to_the_whole_one(num_validated: int) -> None:
    """Wherever the first process dies after the place where the second continues, the two together are the whole."""
    whole = validated_lines()
    begin = 2 + 2 * num_validated
    again = [begun(pid=2), resumed(0, 2, validation_batch=num_validated), *whole[begin:]]
    for killed in range(begin, len(whole)):
        found = join(0, [[begun(), *whole[:killed]], again])
        assert first_mismatch([join(0, [[begun(), *whole]])], [found]) is None


@pytest.mark.parametrize(
    ("text", "num_kept"),
    [
        ("at the validation run after batch 1 of epoch 0", 2),
        ("after the step of batch 1 of epoch 0", 2),
        ("at the end of the validation run after batch 1 of epoch 0", 9),
        ("before batch 2 of epoch 0", 9),
    ],
)
def test_batches_of_a_validation_run_that_is_repeated_count_once(text: str, num_kept: int) -> None:
    """Of the place of a validation run, those batches are kept that are not run again."""
    found = join(0, [[begun(), *validated_lines()], [begun(pid=2), resumed(0, 2, text=text)]])
    assert len(found.events) == num_kept


@pytest.mark.parametrize("num_done", range(NUM_BATCHES + 1))
def test_an_evaluation_that_continues_joins_to_the_whole_one(num_done: int) -> None:
    """Batches since the autosave that come again count once. A finished evaluation reports its end again."""
    place = {"fit": 2, "validation_batch": num_done}
    words = "after the end of test" if num_done == NUM_BATCHES else f"before batch {num_done} of test"
    restored = [begun(pid=2), resumed(0, 3, text="after the end of the fit"), whole_lines()[-7]]
    assert restored[-1]["event"] == ledger.END
    again = [*restored, {**TEST, "pid": 2}, resumed(0, 0, text=words, **place), *evaluation_lines(start=num_done)]
    for killed in range(len(whole_lines()) - 5 + num_done, len(whole_lines()) + 1):
        found = join(0, [whole_lines()[:killed], again])
        assert first_mismatch([join(0, [whole_lines()])], [found]) is None


def test_numbers_count_training_and_evaluations_in_their_order() -> None:
    """A batch of any stage has a number over the whole run, and a place before which a process saves."""
    places = [(1, 0, 0), (1, 0, 1), (1, 0, 2, 0), (1, 0, 2, 1), (1, 0, 2, 2), (1, 0, 2)]
    places += [(2, 0, 0, number) for number in range(4)]
    assert [NUMBERS.place_of(number) for number in range(10)] == places
    assert [NUMBERS.at(place_before(place)) for place in places] == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert [NUMBERS.trained_before(number) for number in range(11)] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [NUMBERS.begin_of_run(number) for number in range(10)] == [0, 0, 2, 2, 2, 0, 6, 6, 6, 6]
    assert NUMBERS.stages == ("train", "validation", "test")
    assert [NUMBERS.of_stages([stage]) for stage in STAGES] == [[0, 1, 5], [2, 3, 4], [6, 7, 8, 9], []]
    saved = [(1, 0, 2, {}), (1, 0, 2, {"validation_batch": 1}), (2, 0, 0, {"validation_batch": 3})]
    run = join(0, [[begun(), TEST, *(autosave_line(e, b, **v) | {"fit": f} for f, e, b, v in saved)]])
    assert [NUMBERS.at(place) for _, place in run.autosaves] == [5, 3, 9]


def settings(**values: Any) -> DrillSettings:
    """Return the settings of a drill."""
    return DrillSettings(command=("x",), directory=Path(), token="t", **values)


def test_each_stage_gets_as_many_strikes_as_the_others() -> None:
    """However few batches a stage has, it gets its share; what is not named is not struck."""
    for seed in range(20):
        moments = moments_of(settings(seed=seed, num_strikes=7), NUMBERS)
        stages = [NUMBERS.step(moment.batch).stage for moment in moments]
        assert [stages.count(stage) for stage in STAGES] == [3, 2, 2, 0]
        assert all(moment.batch for moment in moments)
        named = moments_of(settings(seed=seed, num_strikes=3, stages=("test",)), NUMBERS)
        assert {NUMBERS.step(moment.batch).stage for moment in named} == {"test"}
        assert all(moment.hook == "start" for moment in named)


def moments_at(*batches: int) -> list[StrikeMoment]:
    """Return moments at batches of `NUMBERS`; in training, exceptions are raised at ``step``."""
    hooks = ["step" if NUMBERS.step(batch).stage == "train" else "start" for batch in batches]
    return [StrikeMoment(batch=b, fraction=0.5, hook=hook) for b, hook in zip(batches, hooks, strict=True)]


@pytest.mark.parametrize(
    ("batches", "first", "expected"),
    [
        ((1, 3), 0, (1, 3)),
        ((1,), 2, (5,)),  # not the validation run in between
        ((1, 2), 3, (3, 5)),  # in order
        ((3, 4), 5, ()),  # neither training nor test
        ((1, 4, 7), 6, (7,)),
        ((9,), 10, ()),
    ],
)
def test_a_moment_moves_in_its_own_stage(batches: tuple[int, ...], first: int, expected: tuple[int, ...]) -> None:
    """A moment that is too early moves to the next batch of its stage, and is left out if there is none."""
    found = moved(moments_at(*batches), NUMBERS, first)
    assert tuple(moment.batch for moment in found) == expected
    assert found == moments_at(*expected)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [((1, 3, 5), (3, 5, 5)), ((2, 4, 7), (3, 4, 7)), ((4, 5), (5,)), ((6, 7, 8), (7, 7, 8)), ((), ())],
)
def test_an_exception_that_came_too_early_comes_later_in_its_stage(
    batches: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    """It comes at a later batch of its stage, if there is one; moments of other stages stay."""
    assert postponed(moments_at(*batches), NUMBERS) == moments_at(*expected)


def test_requested_batches_are_counted_over_what_is_named() -> None:
    """--at counts training batches, or those of the named stages together."""
    for stages, batches in ((), [1, 5]), (("test",), [7, 8]), (("validation", "test"), [3, 4]):
        moments = moments_of(settings(stages=stages, at=(2, 1)), NUMBERS)
        assert [moment.batch for moment in moments] == batches


@pytest.mark.parametrize(
    ("batch", "num_twice", "saves", "hold"),
    [
        (1, 0, [(1, 0, 1)], (1, 0, 1)),
        (2, 3, [(1, 0, 1), (1, 0, 2, 0)], (1, 0, 2, 1)),
        (4, 1, [(1, 0, 1), (1, 0, 2, 1)], (1, 0, 2, 2)),
        (5, 0, [(1, 0, 2)], (1, 0, 2)),
        (8, 3, [(2, 0, 0, 0)], (2, 0, 0, 3)),
    ],
)
def test_a_process_saves_inside_the_evaluation_that_is_struck(
    batch: int, num_twice: int, saves: list[tuple[int, ...]], hold: tuple[int, ...]
) -> None:
    """It saves before a batch of the same run, of validation also before it; it waits before a batch of the run."""
    moment = StrikeMoment(batch=batch, fraction=0.5, hook="start", num_twice=num_twice)
    plan = plan_of(settings(), [moment], NUMBERS, num_saved=0)
    assert (list(plan.saves), plan.hold) == (saves, hold)


def test_a_strike_names_the_batch_of_the_evaluation() -> None:
    """It says in which evaluation it hit and where that continued, in training batches and in those of the run."""
    whole = whole_lines()
    first = whole[:7]  # two batches of the validation run are done
    second = [begun(pid=2), resumed(0, 2, validation_batch=1), *whole[5:-3]]
    third = [begun(pid=3), resumed(0, 3, text="after the end of the fit"), {**TEST, "pid": 3}]
    third += [resumed(0, 0, fit=2, text="before batch 1 of test", validation_batch=1), *evaluation_lines(start=1)]
    processes = cast("list[DrillProcess]", [StruckProcess(lines) for lines in (first, second, third)])
    one, other = strikes_of(stretches_of(processes, NUMBERS), "KILL")
    assert (one.stage, one.place) == ("validation", "batch 2 of the validation run after batch 1 of epoch 0")
    assert (one.epoch, one.batch, one.at, one.resumed_at, one.resumed_batch, one.num_twice) == (0, 2, 2, 2, 1, 1)
    assert (other.stage, other.place) == ("test", "batch 2 of test")
    assert (other.epoch, other.batch, other.at, other.resumed_at, other.resumed_batch) == (None, 2, 3, 3, 1)


def mismatch_of(change: Change) -> Mismatch:
    """Return the first difference of a whole run and a changed one."""
    found = first_mismatch([join(0, [whole_lines()])], [join(0, [changed(whole_lines(), change)])])
    assert found is not None
    return found


def of_test(event: str, number: int | None = None, **values: Any) -> Change:
    """Change the lines of a kind in the test, or the one of a batch; without values, leave them out."""

    def change(found: Line) -> Line | None:
        is_meant = (found["event"], found["fit"]) == (event, 2)
        if is_meant and number in (None, found.get("validation_batch")):
            return {**found, **values} if values else None
        return found

    return change


RETURNED = {"accuracy": OTHER}
DIFFERENCES: dict[str, tuple[Change, str, str, str]] = {
    "other data": (of_test("evaluated", 3, content="x"), "batch 2 of test", "content of the batch", "augmentation"),
    "generators": (of_test("evaluated", 3, rng="x"), "batch 2 of test", "random generators", "main RNG"),
    "output": (of_test("evaluated", 3, output=OTHER), "batch 2 of test", "what the step returned", "weights"),
    "lost": (of_test("evaluated", 3), "batch 2 of test", "what comes next", "course of the run"),
    "repeated": (
        of_test("evaluated", 3, validation_batch=2),
        "batch 2 of test",
        "what comes next",
        "course of the run",
    ),
    "returned": (of_test("end", returned=RETURNED), "the end of test", "returned accuracy", "returned results"),
    "validation": (
        lambda found: {**found, "output": OTHER} if (found["fit"], found.get("validation_batch")) == (1, 2) else found,
        "batch 1 of the validation run after batch 1 of epoch 0",
        "what the step returned",
        "weights",
    ),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_the_first_difference_of_an_evaluation_is_named(case: str) -> None:
    """A repeated or lost batch, another output, and another result are named in words, with a cause."""
    change, place, name, part = DIFFERENCES[case]
    mismatch = mismatch_of(change)
    difference = difference_of(mismatch)
    assert (difference.place, difference.values[0].name) == (place, name)
    assert causes.cause_of(mismatch).part == part
    is_in_validation = case == "validation"
    num_before = (2, 1) if is_in_validation else (3, 3 + (NUM_BATCHES if case == "returned" else 2))
    assert (difference.num_equal, difference.num_evaluated_equal) == num_before


def test_a_repeated_batch_is_shown_against_the_next_one() -> None:
    """The two batches are named as the user counts them."""
    [value] = difference_of(mismatch_of(of_test("evaluated", 3, validation_batch=2))).values
    assert (value.expected, value.found) == ("batch 2 of test", "batch 1 of test")


def test_calls_of_one_function_are_counted_by_themselves() -> None:
    """The second test is test 2 and the second fit is fit 2, whatever else the script has called."""
    lines = [begun(), *fit_lines(), TEST, *evaluation_lines(), begun(fit=3), *fit_lines(fit=3)]
    lines += [begun(fit=4, function="test"), *evaluation_lines(fit=4)]
    events = join(0, [lines]).events
    found = {str(event) for event in events if event.kind in (ledger.BATCH, ledger.EVALUATED)}
    assert {"batch 3 of epoch 1", "batch 3 of epoch 1 of fit 2", "batch 3 of test", "batch 3 of test 2"} <= found


# Drills of the stand-in.

SCRIPT = ("--every=0", "--epochs=2", "--batches=3", "--seconds=0", "--heeds")
EVALUATES = (*SCRIPT, "--validation=3", "--test=5", "--predict=4")


def assert_exact(found: DrillResult, *stages: str) -> None:
    """Check that a drill found nothing, and struck these stages in this order."""
    assert found.verdict.word == result.EXACT, found.verdict
    assert tuple(strike.stage for strike in found.strikes) == stages


@pytest.mark.parametrize("kind", ["KILL", "TERM", "exception"])
def test_every_stage_of_a_script_is_struck_and_compared(kind: str, tmp_path: Path) -> None:
    """A script that fits, tests, and predicts is drilled as one, with strikes in each, and each continues inside."""
    found = drill(tmp_path, *EVALUATES, kind=kind, num_strikes=4)
    assert found.verdict.word == result.EXACT, found.verdict
    assert {strike.stage for strike in found.strikes} == set(STAGES)
    for strike in found.strikes:
        assert strike.num_twice <= 4
        assert (strike.resumed_batch is None) == (strike.stage == "train")
        assert strike.resumed_batch is None or 0 <= strike.resumed_batch <= strike.batch
    assert found.interrupted is not None
    assert (found.interrupted.num_evaluated, len(found.interrupted.curve)) == (15, 6)
    assert "6 batches, 2 validation runs, 15 evaluation batches" in found.verdict.text
    assert found.verdict.text.endswith(
        "the final weights, and everything that evaluations returned are bit for bit those of the uninterrupted run."
    )


def test_a_script_that_only_evaluates_is_drilled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a fit, too, each strike continues inside the evaluation. The bar has no end that it is at from the start.

    Without a number of training batches, the bar pulses.
    """
    shown = set()
    one = make(tmp_path, *SCRIPT, "--fits=0", "--test=6", num_strikes=2)
    monkeypatch.setattr(one.progress, "update", lambda status: shown.add(status.num_batches))
    found = one.run()
    assert shown == {None}
    assert_exact(found, "test", "test")
    assert all(strike.resumed_batch for strike in found.strikes)
    assert "6 evaluation batches and everything that evaluations returned" in found.verdict.text


def test_named_stages_are_struck_and_no_others(tmp_path: Path) -> None:
    """The places of --in get all strikes, with --at exactly before the named batches of them."""
    found = drill(tmp_path, *EVALUATES, stages=("validation", "predict"), at=(4, 8), num_strikes=9)
    assert_exact(found, "validation", "predict")
    assert [strike.batch for strike in found.strikes] == [1, 2]
    assert [strike.num_twice for strike in found.strikes] == [0, 0]


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"stages": ("test",)}, "--in test: the script has no batch of test. It has batches of train and validation."),
        ({"stages": ("validation",), "at": (6,)}, "--at 6 is after the end: the run has 6 batches of validation."),
        ({"at": (6,)}, "--at 6 is after the end: the run has 6 batches of training."),
    ],
)
def test_a_place_that_the_script_never_reaches_is_an_error(named: dict[str, Any], text: str, tmp_path: Path) -> None:
    """The message says what the script does reach, and nothing is interrupted."""
    found = drill(tmp_path, *SCRIPT, "--validation=3", **named)
    assert (found.verdict.word, found.verdict.text) == (result.NOT_JUDGED, text)
    assert found.verdict.cause is not None
    assert (found.verdict.cause.part, found.interrupted) == ("usage", None)


@pytest.mark.parametrize("kind", ["KILL", "TERM", "exception"])
def test_more_strikes_than_batches_of_a_stage_stay_in_it(kind: str, tmp_path: Path) -> None:
    """Strikes that can't come in the named stage are left out: none comes in the training after it."""
    script = (*SCRIPT, "--validation=2")
    found = drill(tmp_path, *script, stages=("validation",), num_strikes=9, kind=kind)
    assert found.verdict.word == result.EXACT, found.verdict
    assert {strike.stage for strike in found.strikes} == {"validation"}
    assert len(found.strikes) >= 2
    assert {strike.hook for strike in found.strikes} == {"start" if kind == "exception" else ""}


FLAWS = {
    ("position lost", "validation"): ("batch 1 of the validation run after batch 2 of epoch 0", "what comes next"),
    ("metrics doubled", "validation"): ("the validation run after batch 2 of epoch 0", "sum"),
    ("position lost", "test"): ("batch 1 of test", "what comes next"),
    ("metrics doubled", "test"): ("the end of test", "returned sum"),
    ("prediction lost", "predict"): ("the end of predict", "returned number of predictions"),
}


@pytest.mark.parametrize(("flaw", "stage"), FLAWS)
def test_a_flaw_of_a_resumed_evaluation_is_found(flaw: str, stage: str, tmp_path: Path) -> None:
    """A lost position, a doubled metric, and a lost prediction are found, and named where they show first."""
    found = drill(tmp_path, *EVALUATES, "--flaw", flaw, stages=(stage,), at=(1,))
    assert found.verdict.word == result.DIFFERS
    assert found.verdict.difference is not None
    place, name = FLAWS[flaw, stage]
    assert (found.verdict.difference.place, found.verdict.difference.values[0].name) == (place, name)


def test_an_evaluation_that_begins_again_is_found(tmp_path: Path) -> None:
    """A test that starts over after an autosave inside it did not resume."""
    found = drill(tmp_path, *SCRIPT, "--fits=0", "--test=6", "--flaw=begins again", num_strikes=1)
    assert found.verdict.word == result.NOT_RESUMED
    assert found.verdict.cause is not None
    assert found.verdict.cause.part == "not resumed"


def test_the_stages_follow_each_other_in_a_drill() -> None:
    """The order of a run is that of its batches."""
    places = [step.place for step in join(0, [whole_lines()]).steps]
    assert all(one < other for one, other in itertools.pairwise(places))
