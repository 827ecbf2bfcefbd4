"""Compare a replay with the ledger of its run: whatever both have a line for must be equal, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_faulttolerant.cli.drill.comparison import Mismatch, difference_of, different_fields
from lightning_faulttolerant.cli.drill.ledgers import Event, RankOfRun, join
from lightning_faulttolerant.cli.drill.result import Difference
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """The result of a comparison.

    Args:
        num_steps: How many training steps of the replay have a line in the ledger of the run.
        difference: The first difference; ``None`` if all is equal.
    """

    num_steps: int = 0
    difference: Difference | None = None


def compare(
    original: str, replay: str, *, fit: int, ranks: Iterable[int], before: tuple[int, int] | None = None
) -> Compared:
    """Compare the ledgers of all ranks.

    Args:
        original: The ledger of the run, of rank 0.
        replay: The ledger of the replay, of rank 0.
        fit: The number of the fit that was replayed.
        ranks: The ranks of the replay.
        before: Epoch and batch of the first step that differs on purpose; it and later ones are not compared.
    """
    found = [
        _of_rank(rank, *(_read(path, rank) for path in (original, replay)), fit=fit, before=before)
        for rank in sorted(ranks)
    ]
    differences = [one.difference for one in found if one.difference is not None]
    first = min(differences, key=lambda difference: (difference.number, difference.rank), default=None)
    return Compared(num_steps=min((one.num_steps for one in found), default=0), difference=first)


def steps_of(replay: str, *, fit: int) -> list[Event]:
    """Return the training steps in the ledger of a replay, on rank 0.

    Args:
        replay: The ledger.
        fit: The number of the fit that was replayed.
    """
    return [event for event in _read(replay, 0).batches if event.fit == fit]


def _read(path: str, rank: int) -> RankOfRun:
    return join(rank, [read_lines(ledger.path_of_rank(path, rank))])


def _of_rank(
    rank: int, original: RankOfRun, replay: RankOfRun, *, fit: int, before: tuple[int, int] | None
) -> Compared:
    expected: defaultdict[tuple[object, ...], list[Event]] = defaultdict(list)
    for event in original.fits.get(fit, []):
        expected[_key(event)].append(event)
    num_steps, num_before = 0, 0
    for event in replay.fits.get(fit, []):
        if before is not None and event.place[1:3] > before:
            break
        lines = expected[_key(event)]
        one = _comparable(lines.pop(0), event) if lines else None
        fields = None if one is None else different_fields(one, event)
        if fields is not None:
            mismatch = Mismatch(
                rank=rank,
                expected=one,
                found=event,
                fields=fields,
                number=num_before,
                num_evaluated=0,
                expected_next=(),
                found_next=(),
            )
            return Compared(num_steps=num_steps, difference=difference_of(mismatch))
        num_before += event.kind == ledger.BATCH
        num_steps += event.kind == ledger.BATCH and one is not None
    return Compared(num_steps=num_steps)


def _key(event: Event) -> tuple[object, ...]:
    """Return what the lines of the same moment have in common. A moment may have several of one kind."""
    return event.kind, event.place, event.in_validation, event.is_epoch_end, event.values.get("logger")


def _comparable(expected: Event, found: Event) -> Event:
    """Return the line of the run, with what it does not know as in the replay: a ledger may lack the order."""
    if expected.values.get("order", "") is None:
        expected.values["order"] = found.values.get("order")
    return expected
