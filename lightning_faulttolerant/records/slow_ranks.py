"""Which ranks are slow, and in which section, from the time that each rank needs itself.

Ranks that train together wait for each other in each step. So all take equally long, and only the time that a rank
spends before it waits tells which one is slow. A rank is slow if the others would be done sooner without it: if a batch
takes it 20 % longer than it would take the median of the other ranks. With two ranks, that is the other one.

If user code waits for other ranks inside a section, what a rank loses there the others lose by waiting. Their sums are
then equal, and none is called slow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SECTIONS = ("data", "step", "evaluation", "save")
"""Waiting for data; hooks and the forward pass of a step, and everything after its backward pass; evaluation until its
last batch is done; the own state for a save until all states are gathered.
"""
SLOWER = 0.2
NUM_SAVES = 3

OwnSeconds = tuple[float, float, float, float]
"""The seconds that a rank has spent itself in each of the `SECTIONS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowRank:
    """A rank that keeps the others waiting.

    Args:
        rank: Its number.
        section: The section in which it loses most; one of `SECTIONS`.
        slower: By which share it takes longer than the median of the others, such as 0.2.
        number: For how many autosaves this was found.
    """

    rank: int
    section: str
    slower: float
    number: int = 1


def slow_ranks(of_ranks: Sequence[OwnSeconds], seconds: float) -> tuple[SlowRank, ...]:
    """Return the ranks that are slow.

    Args:
        of_ranks: What each rank has spent itself.
        seconds: How long all of them took together.

    Example:
        >>> slow_ranks([(0.1, 1.0, 0.0, 0.0), (0.6, 1.0, 0.0, 0.0)], 2.5)
        (SlowRank(rank=1, section='data', slower=0.25, number=1),)
    """
    if len(of_ranks) < 2:
        return ()
    totals = [sum(own) for own in of_ranks]
    in_order = sorted(totals)
    found = []
    for rank, total in enumerate(totals):
        lost = total - _median_of_others(in_order, total)
        if lost > SLOWER * (seconds - lost) > 0:
            section = _worst_section(of_ranks, rank)
            found.append(SlowRank(rank=rank, section=section, slower=round(lost / (seconds - lost), 3)))
    return tuple(found)


def _median_of_others(in_order: Sequence[float], one: float) -> float:
    """Return the median of sorted numbers without one of them, in constant time: there may be thousands of ranks."""
    place, number = bisect_left(in_order, one), len(in_order) - 1
    left, right = (in_order[index + (index >= place)] for index in ((number - 1) // 2, number // 2))
    return (left + right) / 2


def _worst_section(of_ranks: Sequence[OwnSeconds], rank: int) -> str:
    def lost(section: int) -> float:
        others = (own[section] for index, own in enumerate(of_ranks) if index != rank)
        return of_ranks[rank][section] - median(others)

    return SECTIONS[max(range(len(SECTIONS)), key=lost)]


def summed(found: Sequence[SlowRank]) -> list[SlowRank]:
    """Return one entry for each rank and section, the most frequent first, with the mean of how much slower it was.

    Args:
        found: The slow ranks of several autosaves.
    """
    sums: dict[tuple[int, str], tuple[int, float]] = {}
    for each in found:
        number, slower = sums.get((each.rank, each.section), (0, 0.0))
        sums[each.rank, each.section] = number + each.number, slower + each.number * each.slower
    made = [
        SlowRank(rank=rank, section=section, slower=slower / number, number=number)
        for (rank, section), (number, slower) in sums.items()
    ]
    return sorted(made, key=lambda each: (-each.number, each.rank))
