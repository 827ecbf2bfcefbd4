from __future__ import annotations

import itertools

import pytest

from lightning_faulttolerant.cli.drill.comparison import first_mismatch
from lightning_faulttolerant.cli.drill.ledgers import BatchNumbers, join, resumption_of
from lightning_faulttolerant.records.lines import Line
from tests.cli.drill.made import NUM_BATCHES, NUM_EPOCHS, batch_line, begun, fit_lines, log_line, resumed

PLACES = list(itertools.product(range(NUM_EPOCHS), range(NUM_BATCHES)))


def cut(lines: list[Line], number: int) -> list[Line]:
    """Return the lines of a process that was killed after a number of lines."""
    return lines[:number]


@pytest.mark.parametrize("place", PLACES, ids=str)
def test_a_run_that_continues_at_a_boundary_joins_to_the_whole_one(place: tuple[int, int]) -> None:
    """Wherever the first process dies after the place where the second resumes, the two together are the whole run."""
    whole = fit_lines()
    first_after = whole.index(batch_line(*place))
    for number in range(first_after, len(whole)):
        again = [begun(pid=2), resumed(*place), *fit_lines(start=place)]
        found = join(0, [[begun(), *cut(whole, number)], again])
        assert first_mismatch([join(0, [[begun(), *whole]])], [found]) is None
        assert [event.process for event in found.batches].count(1) == len(PLACES) - PLACES.index(place)


def test_what_a_step_logged_before_its_end_is_dropped_with_the_step() -> None:
    """Values that were logged in an unfinished step count once: the second time."""
    inside = log_line(0, 2, metrics={"inside": 1})
    whole = [batch_line(0, 0), log_line(0, 1), inside, batch_line(0, 1)]
    found = join(0, [[begun(), *whole[:3]], [begun(pid=2), resumed(0, 1), *whole[2:]]])
    assert first_mismatch([join(0, [[begun(), *whole]])], [found]) is None


@pytest.mark.parametrize(
    ("text", "num_kept"),
    [
        ("at the validation run after batch 4 of epoch 0", 8),
        ("after the step of batch 3 of epoch 0", 7),
        ("at the end of the validation run after batch 4 of epoch 0", 11),
        ("at the end of epoch 0", 10),
        ("before batch 4 of epoch 0", 11),
    ],
)
def test_what_counts_of_one_place_depends_on_where_in_it_the_state_was_taken(text: str, num_kept: int) -> None:
    """A validation run, or the end of an epoch, that is repeated counts once."""
    again = [begun(pid=2), resumed(0, NUM_BATCHES, text=text)]
    found = join(0, [[begun(), *fit_lines()], again])
    assert len(found.events) == num_kept


@pytest.mark.parametrize("num_validated", [0, 1, 2])
def test_a_validation_run_that_continues_keeps_what_its_batches_logged(num_validated: int) -> None:
    """Values of the validation batches that are done count; those of later ones come again."""
    batches = [batch_line(0, 0), batch_line(0, 1)]
    judged = [log_line(0, 2, validating=True, validation_batch=number) for number in (1, 2, 3)]
    again = {**resumed(0, 2, text="before a batch of the validation run"), "validation_batch": num_validated}
    found = join(0, [[begun(), *batches, *judged], [begun(pid=2), again, *judged[num_validated:]]])
    assert first_mismatch([join(0, [[begun(), *batches, *judged]])], [found]) is None


def test_a_fit_that_had_ended_keeps_all_but_its_end() -> None:
    """A restart after the end of a fit reports that end again, and continues with the next fit of the script."""
    whole = [begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]
    ended = resumed(1, NUM_BATCHES, text="after the end of the fit")
    again = [begun(pid=2), ended, fit_lines()[-1]]
    second = [begun(fit=2, pid=2), resumed(1, 1, fit=2), *fit_lines(fit=2, start=(1, 1))]
    found = join(0, [whole[:-5], [*again, *second]])
    expected = join(0, [whole])
    assert first_mismatch([expected], [found]) is None
    numbers = BatchNumbers(expected.batches)
    assert [numbers.at(resumption.place) for resumption in found.resumed] == [8, 13]


def test_a_process_that_dies_before_it_does_anything_takes_nothing_away() -> None:
    """A process killed between its start and its first batch changes nothing in the joined lines."""
    whole = fit_lines()
    processes = [
        [begun(), *whole[:9]],
        [begun(pid=2)],
        [begun(pid=3), resumed(0, 2)],
        [begun(pid=4), resumed(0, 2), *fit_lines(start=(0, 2))],
    ]
    assert first_mismatch([join(0, [[begun(), *whole]])], [join(0, processes)]) is None


def test_a_fit_that_starts_over_counts_from_its_start() -> None:
    """Without a place of a resume, the lines of an earlier process of the fit are dropped."""
    found = join(0, [[begun(), *fit_lines()[:9]], [begun(pid=2), *fit_lines()]])
    assert [event.process for event in found.batches] == [1] * len(PLACES)


def test_ranks_that_a_launcher_starts_again_write_on_in_one_file() -> None:
    """Lines of several processes in one file are joined like those in several files."""
    lines = [begun(), *fit_lines()[:9], begun(pid=2), resumed(0, 3), *fit_lines(start=(0, 3))]
    assert first_mismatch([join(0, [[begun(), *fit_lines()]])], [join(0, [lines])]) is None


def test_numbers_count_batches_over_epochs_and_fits() -> None:
    """A place in any fit has a number over the whole run, and back."""
    numbers = BatchNumbers(join(0, [[begun(), *fit_lines(), begun(fit=2), *fit_lines(fit=2)]]).batches)
    assert (len(numbers), numbers.num_fits) == (16, 2)
    assert [
        numbers.at(place)
        for place in [(1, 0, 0, 0), (1, 0, 4, 0), (1, 1, 0, 0), (1, 1, 2, 0), (2, 0, 0, 0), (2, 1, 4, 0)]
    ] == [
        0,
        4,
        4,
        6,
        8,
        16,
    ]
    assert [numbers.place_of(number) for number in (0, 5, 8, 15)] == [(1, 0, 0), (1, 1, 1), (2, 0, 0), (2, 1, 3)]
    assert numbers.at(resumption_of(1, resumed(1, 4, text="after the end of the fit")).place) == 8
