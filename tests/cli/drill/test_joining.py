"""Lines of several processes are joined to one run; its batches have numbers, and strikes have places in it."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest

from lightning_faulttolerant.cli.drill.comparison import first_mismatch
from lightning_faulttolerant.cli.drill.ledgers import STAGES, BatchNumbers, join, place_before, resumption_of
from lightning_faulttolerant.cli.drill.process import DrillProcess, DrillSettings
from lightning_faulttolerant.cli.drill.running import Clock
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
from lightning_faulttolerant.records.lines import Line, append_line
from tests.cli.drill.made import (
    NUM_BATCHES,
    NUM_EPOCHS,
    StruckProcess,
    autosave_line,
    batch_line,
    begun,
    evaluation_lines,
    fit_lines,
    line,
    log_line,
    resumed,
    validated_lines,
    whole,
    whole_lines,
)

PLACES = list(itertools.product(range(NUM_EPOCHS), range(NUM_BATCHES)))
TEST = begun(fit=2, function="test")
NUMBERS = BatchNumbers(join(0, [whole_lines()]).steps)
"""Two training batches, three of validation, one of training, four of test."""


def assert_joined(expected: list[Line], *processes: list[Line]) -> None:
    """Check that the lines of these processes are, together, those of the run."""
    assert first_mismatch([join(0, [expected])], [join(0, list(processes))]) is None


def test_a_run_that_continues_at_a_boundary_joins_to_the_whole_one() -> None:
    """Wherever the first process dies after the place where the second resumes, the two together are the whole run."""
    all_lines = fit_lines()
    for place in PLACES:
        again = [begun(pid=2), resumed(*place), *fit_lines(start=place)]
        for number in range(all_lines.index(batch_line(*place)), len(all_lines)):
            assert_joined([begun(), *all_lines], [begun(), *all_lines[:number]], again)
        found = join(0, [[begun(), *all_lines], again])
        assert [event.process for event in found.batches].count(1) == len(PLACES) - PLACES.index(place)


def test_a_validation_run_that_continues_joins_to_the_whole_one() -> None:
    """What is logged and done in validation batches before the place where the second process continues counts once."""
    all_lines = validated_lines()
    for num_validated in range(4):
        begin = 2 + 2 * num_validated
        again = [begun(pid=2), resumed(0, 2, validation_batch=num_validated), *all_lines[begin:]]
        for killed in range(begin, len(all_lines)):
            assert_joined([begun(), *all_lines], [begun(), *all_lines[:killed]], again)


def test_an_evaluation_that_continues_joins_to_the_whole_one() -> None:
    """Batches since the autosave that come again count once. A finished evaluation reports its end again."""
    for num_done in range(NUM_BATCHES + 1):
        place = {"fit": 2, "validation_batch": num_done}
        words = "after the end of test" if num_done == NUM_BATCHES else f"before batch {num_done} of test"
        restored = [begun(pid=2), resumed(0, 3, text="after the end of the fit"), whole_lines()[-7]]
        again = [*restored, {**TEST, "pid": 2}, resumed(0, 0, text=words, **place), *evaluation_lines(start=num_done)]
        for killed in range(len(whole_lines()) - 5 + num_done, len(whole_lines()) + 1):
            assert_joined(whole_lines(), whole_lines()[:killed], again)


INSIDE = [batch_line(0, 0), log_line(0, 1), log_line(0, 2, metrics={"inside": 1}), batch_line(0, 1)]


@pytest.mark.parametrize(
    ("expected", "processes"),
    [
        (INSIDE, [INSIDE[:3], [begun(pid=2), resumed(0, 1), *INSIDE[2:]]]),
        (
            fit_lines(),
            [
                fit_lines()[:9],
                [begun(pid=2)],
                [begun(pid=3), resumed(0, 2)],
                [begun(pid=4), resumed(0, 2), *fit_lines(start=(0, 2))],
            ],
        ),
        (fit_lines(), [[*fit_lines()[:9], begun(pid=2), resumed(0, 3), *fit_lines(start=(0, 3))]]),
        (fit_lines(), [fit_lines()[:9], [begun(pid=2), *fit_lines()]]),
    ],
    ids=["logged in an unfinished step", "idle processes", "one file of a launcher's processes", "starts over"],
)
def test_what_came_twice_counts_once(expected: list[Line], processes: list[list[Line]]) -> None:
    """Lines of an unfinished step, of processes that did nothing, and of several processes in one file are joined."""
    assert_joined([begun(), *expected], [begun(), *processes[0]], *processes[1:])


@pytest.mark.parametrize(
    ("text", "lines", "batch", "num_kept"),
    [
        ("at the validation run after batch 4 of epoch 0", fit_lines(), NUM_BATCHES, 8),
        ("after the step of batch 3 of epoch 0", fit_lines(), NUM_BATCHES, 7),
        ("at the end of the validation run after batch 4 of epoch 0", fit_lines(), NUM_BATCHES, 11),
        ("at the end of epoch 0", fit_lines(), NUM_BATCHES, 10),
        ("before batch 4 of epoch 0", fit_lines(), NUM_BATCHES, 11),
        ("at the validation run after batch 1 of epoch 0", validated_lines(), 2, 2),
        ("after the step of batch 1 of epoch 0", validated_lines(), 2, 2),
        ("at the end of the validation run after batch 1 of epoch 0", validated_lines(), 2, 9),
        ("before batch 2 of epoch 0", validated_lines(), 2, 9),
    ],
)
def test_what_counts_of_one_place_depends_on_where_in_it_the_state_was_taken(
    text: str, lines: list[Line], batch: int, num_kept: int
) -> None:
    """A validation run, or the end of an epoch, that is repeated counts once."""
    assert len(join(0, [[begun(), *lines], [begun(pid=2), resumed(0, batch, text=text)]]).events) == num_kept


def test_a_fit_that_had_ended_keeps_all_but_its_end() -> None:
    """A restart after the end of a fit reports that end again, and continues with the next fit of the script."""
    all_lines = [begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]
    again = [begun(pid=2), resumed(1, NUM_BATCHES, text="after the end of the fit"), fit_lines()[-1]]
    again += [begun(fit=2, pid=2), resumed(1, 1, fit=2), *fit_lines(fit=2, start=(1, 1))]
    assert_joined(all_lines, all_lines[:-5], again)
    numbers = BatchNumbers(join(0, [all_lines]).batches)
    assert [numbers.at(each.place) for each in join(0, [all_lines[:-5], again]).resumed] == [8, 13]


def test_numbers_count_batches_over_epochs_fits_and_evaluations() -> None:
    """A place in any fit or evaluation has a number over the whole run, and back."""
    numbers = BatchNumbers(join(0, [[begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]]).batches)
    assert (len(numbers), numbers.num_fits) == (16, 2)
    places = {(1, 0, 0, 0): 0, (1, 0, 4, 0): 4, (1, 1, 0, 0): 4, (1, 1, 2, 0): 6, (2, 0, 0, 0): 8, (2, 1, 4, 0): 16}
    assert {place: numbers.at(place) for place in places} == places
    assert [numbers.place_of(number) for number in (0, 5, 8, 15)] == [(1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 3)]
    assert numbers.at(resumption_of(1, resumed(1, 4, text="after the end of the fit")).place) == 8
    inside: list[Any] = [(1, 0, 0), (1, 0, 1), (1, 0, 2, 0), (1, 0, 2, 1), (1, 0, 2, 2), (1, 0, 2)]
    inside += [(2, 0, 0, number) for number in range(4)]
    assert [NUMBERS.place_of(number) for number in range(10)] == inside
    assert [NUMBERS.at(place_before(place)) for place in inside] == list(range(10))
    assert [NUMBERS.trained_before(number) for number in range(11)] == [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [NUMBERS.begin_of_run(number) for number in range(10)] == [0, 0, 2, 2, 2, 0, 6, 6, 6, 6]
    assert NUMBERS.stages == ("train", "validation", "test")
    assert [NUMBERS.of_stages([stage]) for stage in STAGES] == [[0, 1, 5], [2, 3, 4], [6, 7, 8, 9], []]
    saved = [(1, 0, 2, {}), (1, 0, 2, {"validation_batch": 1}), (2, 0, 0, {"validation_batch": 3})]
    run = join(0, [[begun(), TEST, *(autosave_line(e, b, **v) | {"fit": f} for f, e, b, v in saved)]])
    assert [NUMBERS.at(place) for _, place in run.autosaves] == [5, 3, 9]


# Strikes that came.


def strikes(*processes: StruckProcess) -> list[tuple[int, int, int, str]]:
    """Return, for each strike that counts, where it hit, where it resumed, the repeated batches, and the hook."""
    stretches = stretches_of(cast("list[DrillProcess]", list(processes)), BatchNumbers(whole()[0].batches))
    return [(s.at, s.resumed_at, s.num_twice, s.hook) for s in strikes_of(stretches, "exception")]


def test_strikes_are_those_after_which_something_was_gained() -> None:
    """Restarts by a launcher count as those of the drill; a process that gets no further than its start doesn't."""
    first, second = [begun(), *fit_lines()[:6]], [begun(pid=2), resumed(0, 2), *fit_lines(start=(0, 2))[:10]]
    third = [begun(pid=3), resumed(1, 1), *fit_lines(start=(1, 1))]
    expected = [(3, 2, 1, "start"), (6, 5, 1, "end")]
    assert strikes(StruckProcess([*first, *second, *third], hooks=("start", "end"))) == expected
    apart = [StruckProcess(first, hooks=("start",)), StruckProcess(second, hooks=("end",)), StruckProcess(third)]
    assert strikes(*apart) == expected
    same, further = [begun(pid=2), resumed(0, 2)], [begun(pid=3), resumed(0, 2), *fit_lines(start=(0, 2))]
    assert strikes(StruckProcess(first), StruckProcess(same), StruckProcess(further)) == [(3, 2, 1, "")]
    assert strikes(StruckProcess(first), StruckProcess([begun(pid=2), *fit_lines()])) == []


def test_a_strike_names_the_batch_of_the_evaluation() -> None:
    """It says in which evaluation it hit and where that continued, in training batches and in those of the run."""
    first = whole_lines()[:7]  # two batches of the validation run are done
    second = [begun(pid=2), resumed(0, 2, validation_batch=1), *whole_lines()[5:-3]]
    third = [begun(pid=3), resumed(0, 3, text="after the end of the fit"), {**TEST, "pid": 3}]
    third += [resumed(0, 0, fit=2, text="before batch 1 of test", validation_batch=1), *evaluation_lines(start=1)]
    processes = cast("list[DrillProcess]", [StruckProcess(lines) for lines in (first, second, third)])
    one, other = strikes_of(stretches_of(processes, NUMBERS), "KILL")
    assert (one.stage, one.place) == ("validation", "batch 2 of the validation run after batch 1 of epoch 0")
    assert (one.epoch, one.batch, one.at, one.resumed_at, one.resumed_batch, one.num_twice) == (0, 2, 2, 2, 1, 1)
    assert (other.stage, other.place) == ("test", "batch 2 of test")
    assert (other.epoch, other.batch, other.at, other.resumed_at, other.resumed_batch) == (None, 2, 3, 3, 1)


def test_what_a_launcher_starts_again_is_told_from_the_next_fit(tmp_path: Path) -> None:
    """A fit in another process than the one before is a restart only if it had begun already."""

    def written(number: int, *lines: Line) -> DrillProcess:
        process = DrillProcess(settings(directory=tmp_path), "interrupted", number)
        for each in lines:
            append_line(process.ledger, each)
        process.read()
        return process

    batches = BatchNumbers(join(0, [[begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]]).batches)
    progress = written(0, begun(pid=1), *fit_lines(), begun(fit=2, pid=2)).progress
    assert (progress.num_restarts, progress.last_ended, progress.num_expected) == (0, 1, 16)
    again = [batch_line(0, 0, fit=2), begun(pid=3), resumed(2, 4, text="after the end of the fit"), line("end")]
    process = written(0, *again, begun(fit=2, pid=4), resumed(0, 1, fit=2), batch_line(0, 1, fit=2))
    assert (process.progress.num_restarts, process.progress.last_ended) == (1, 1)
    before, after = stretches_of([process], batches)
    assert (before.start, before.done, after.start, after.done) == (0, 9, 9, 10)
    # A second fit that the script starts from its own checkpoint says nothing about the restart.
    lines = [begun(), resumed(0, 2), *fit_lines(start=(0, 2)), begun(fit=2), resumed(1, 0, fit=2)]
    [stretch] = stretches_of([written(1, *lines)], batches)
    assert (stretch.start, stretch.done) == (2, 8)


# Moments of strikes to come.


def settings(**values: Any) -> DrillSettings:
    """Return the settings of a drill."""
    return DrillSettings(**{"command": ("x",), "directory": Path(), "token": "t", **values})


def moments_at(*batches: int) -> list[StrikeMoment]:
    """Return moments at batches of `NUMBERS`; in training, exceptions are raised at ``step``."""
    hooks = ["step" if NUMBERS.step(batch).stage == "train" else "start" for batch in batches]
    return [StrikeMoment(batch=b, fraction=0.5, hook=hook) for b, hook in zip(batches, hooks, strict=True)]


def test_moments_are_spread_over_the_run() -> None:
    """Each of equal parts of a run has one moment, never before the first batch is done; a seed gives the same ones."""

    def numbers(num_batches: int) -> BatchNumbers:
        return BatchNumbers(join(0, [[begun(), *(batch_line(0, batch) for batch in range(num_batches))]]).steps)

    for seed in range(20):
        found = moments_of(settings(num_strikes=5, seed=seed), numbers(101))
        assert [(moment.batch - 1) // 20 for moment in found] == [0, 1, 2, 3, 4]
        assert found == moments_of(settings(num_strikes=5, seed=seed), numbers(101))
        assert all(0 <= moment.fraction < 1 for moment in found)
        moments = moments_of(settings(seed=seed, num_strikes=7), NUMBERS)
        stages = [NUMBERS.step(moment.batch).stage for moment in moments]
        assert [stages.count(stage) for stage in STAGES] == [3, 2, 2, 0]
        assert all(moment.batch for moment in moments)
        named = moments_of(settings(seed=seed, num_strikes=3, stages=("test",)), NUMBERS)
        assert {(NUMBERS.step(moment.batch).stage, moment.hook) for moment in named} == {("test", "start")}
    assert moments_of(settings(), numbers(1)) == []  # nothing can be saved before it
    assert [moment.batch for moment in moments_of(settings(at=(9, 3, 9)), numbers(101))] == [3, 9]
    for stages, batches in ((), [1, 5]), (("test",), [7, 8]), (("validation", "test"), [3, 4]):
        assert [moment.batch for moment in moments_of(settings(stages=stages, at=(2, 1)), NUMBERS)] == batches


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
    assert moved(moments_at(*batches), NUMBERS, first) == moments_at(*expected)


@pytest.mark.parametrize(
    ("batches", "expected"),
    [((1, 3, 5), (3, 5, 5)), ((2, 4, 7), (3, 4, 7)), ((4, 5), (5,)), ((6, 7, 8), (7, 7, 8)), ((), ())],
)
def test_an_exception_that_came_too_early_comes_later(batches: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """It comes at a later batch of its stage, if there is one; moments of other stages stay."""
    assert postponed(moments_at(*batches), NUMBERS) == moments_at(*expected)


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


def test_a_moment_does_not_wait_longer_than_its_batch() -> None:
    """If a batch took long in the uninterrupted run only, the strike still comes before the next one is done."""

    def clock(fraction: float) -> Clock:
        return Clock(StrikeMoment(batch=1, fraction=fraction, hook=""), [1000.0] * 4)

    late, waiting = clock(0.9), clock(0.0)
    assert [late.has_come(done, is_saved=True) for done in (1, 1, 2)] == [False, False, True]
    assert clock(0.0).has_come(1, is_saved=True)
    assert [waiting.has_come(done, is_saved=done == 2) for done in (1, 2)] == [False, True]  # not before the autosave


def test_the_stages_follow_each_other_in_a_drill() -> None:
    """The order of a run is that of its batches."""
    places = [step.place for step in join(0, [whole_lines()]).steps]
    assert all(one < other for one, other in itertools.pairwise(places))
    assert ledger.BATCH in {event.kind for event in join(0, [whole_lines()]).steps}
