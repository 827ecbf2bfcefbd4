"""Which ranks are called slow."""

from __future__ import annotations

from statistics import median

from hypothesis import given, strategies as st

from lightning_faulttolerant.records.history import SECTIONS, SlowRank, slow_ranks, summed_times


def own(**seconds: float) -> tuple[float, float, float, float]:
    """Return the seconds of a rank: 1 s in each section that is not given."""
    return tuple(seconds.get(name, 1.0) for name in SECTIONS)  # type: ignore[return-value]


def test_each_section_is_named() -> None:
    """A rank that loses a third in one section is named with it."""
    for section in SECTIONS:
        found = slow_ranks([own(), own(**{section: 2.0}), own()], 4.0)
        assert found == (SlowRank(rank=1, section=section, slower=0.333),)


def test_twenty_percent_is_the_limit() -> None:
    """By how much a rank is slower is counted from what the others would need without it."""
    assert slow_ranks([own(), own(step=2.0)], 5.9)
    assert not slow_ranks([own(), own(step=2.0)], 6.1)


def test_of_two_ranks_the_other_one_is_the_median() -> None:
    """With two ranks, a median of both would hide half of the loss."""
    [found] = slow_ranks([own(data=1.9), own()], 4.9)
    assert (found.rank, found.slower) == (0, 0.225)


def test_what_others_wait_for_inside_a_section_calls_nobody_slow() -> None:
    """Rank 0 waits in its step for the data of rank 1: both sums are equal, and neither is named."""
    assert slow_ranks([own(data=0.0, step=2.0), own(data=2.0, step=0.0)], 2.5) == ()


def test_short_work_before_a_long_backward_pass_is_no_loss() -> None:
    """Twice as long as the others is nothing if it is a thousandth of a batch."""
    assert slow_ranks([(0.001, 0.001, 0, 0), (0.002, 0.002, 0, 0)], 10.0) == ()


def test_one_rank_is_never_slow() -> None:
    """There is nobody who waits."""
    assert slow_ranks([own()], 1.0) == ()


@given(st.lists(st.floats(0, 100), min_size=2, max_size=9), st.floats(1.0, 3.0))
def test_the_others_are_all_but_the_one(totals: list[float], factor: float) -> None:
    """The median of the others is that of a list without the rank."""
    seconds = max(totals) * factor
    found = {each.rank: each.slower for each in slow_ranks([(total, 0.0, 0.0, 0.0) for total in totals], seconds)}
    for rank, total in enumerate(totals):
        lost = total - median(totals[:rank] + totals[rank + 1 :])
        assert (rank in found) == (lost > 0.2 * (seconds - lost) > 0)


def test_sum_of_many() -> None:
    """Each rank and section has one entry, with the mean over all autosaves."""
    found = [SlowRank(rank=1, section="data", slower=share) for share in (0.3, 0.5)]
    found += [SlowRank(rank=0, section="step", slower=0.25, number=3)]
    assert summed_times(found) == [
        SlowRank(rank=0, section="step", slower=0.25, number=3),
        SlowRank(rank=1, section="data", slower=0.4, number=2),
    ]
