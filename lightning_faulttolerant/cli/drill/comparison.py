"""Compare two runs event by event, and find the first event in which they differ."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from lightning_faulttolerant.cli.drill.ledgers import COMPARED, STEPS, Event, RankOfRun
from lightning_faulttolerant.cli.drill.result import Difference, Value
from lightning_faulttolerant.records import ledger
from lightning_faulttolerant.records.lines import Line

# In the order in which a step computes them.
_FIELDS = (
    *("order", "content", "rng", "loss", "output", "learning_rates"),
    *("returned", "metrics", "weights", "optimizers", "step"),
)
_NAMES = {
    "order": "order of the samples",
    "content": "content of the batch",
    "rng": "random generators",
    "output": "what the step returned",
    "learning_rates": "learning rate",
    "metrics": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mismatch:
    """The first event of a rank in which two runs differ.

    Args:
        rank: Number of the rank.
        expected: The event of the uninterrupted run; None if that run ended before.
        found: The event of the other run.
        fields: The names of the values that differ, in the order in which a step computes them; empty if one of the
            events is missing or the two don't correspond.
        number: Number of training batches before the event.
        num_evaluated: Number of batches of validation runs and evaluations before the event.
        expected_next: The events that follow in the uninterrupted run.
        found_next: The events that follow in the other run.
    """

    rank: int
    expected: Event | None
    found: Event | None
    fields: tuple[str, ...]
    number: int
    num_evaluated: int
    expected_next: Sequence[Event]
    found_next: Sequence[Event]

    @property
    def kind(self) -> str:
        """The kind of the event; empty if the two events are of different kinds."""
        both = self.expected is not None and self.found is not None
        return self.expected.kind if both and self.fields and self.expected is not None else ""

    @property
    def num_steps(self) -> int:
        """The number of batches before the event, of training and of evaluations."""
        return self.number + self.num_evaluated

    @property
    def process(self) -> int:
        """The number of the process of the other run that wrote the event; -1 if the event is missing."""
        return self.found.process if self.found is not None else -1

    @property
    def num_batches_equal_after(self) -> int:
        """The number of following batches that are equal in everything a step depends on and produces."""
        number = 0
        pairs = zip(_batches(self.expected_next), _batches(self.found_next), strict=False)
        for one, other in pairs:
            if one.values != other.values:
                break
            number += 1
        return number


def first_mismatch(
    expected: Sequence[RankOfRun],
    found: Sequence[RankOfRun],
    *,
    ignored: Sequence[str] = (),
    may_end_early: bool = False,
) -> Mismatch | None:
    """Return the first event that differs on any rank, or None.

    Args:
        expected: The ranks of the uninterrupted run.
        found: The ranks of the other run.
        ignored: Patterns of names of logged values that are not compared.
        may_end_early: Whether the other run may have been killed before its end.
    """
    expected_by_rank, found_by_rank = ({run.rank: run for run in runs} for runs in (expected, found))
    mismatches = []
    for rank in sorted({*expected_by_rank, *found_by_rank}):
        one, other = (by_rank.get(rank, RankOfRun(rank=rank)) for by_rank in (expected_by_rank, found_by_rank))
        events = without(one.events, ignored)
        others = without(other.events, ignored)
        mismatch = _first_of_rank(rank, events[: len(others)] if may_end_early else events, others)
        if mismatch is not None:
            mismatches.append(mismatch)
    return min(mismatches, key=lambda mismatch: (mismatch.num_steps, mismatch.rank), default=None)


@final
class Follower:
    """Compares the lines of a running process with the uninterrupted run, as far as the process has come.

    Args:
        expected: Rank 0 of the uninterrupted run.
        ignored: Patterns of names of logged values that are not compared.
    """

    def __init__(self, expected: RankOfRun, ignored: Sequence[str] = ()) -> None:
        self._expected = iter(without(expected.events, ignored))
        self._ignored = ignored
        self._run = RankOfRun(rank=0)
        self._is_over = False
        self.is_different = False
        """Whether a difference is certain already and its cause can be named."""

    def take(self, line: Line) -> None:
        """Take the next line of rank 0."""
        self._run.add(0, line)
        if self._is_over or self._run.is_restarted or line.get("event") not in COMPARED:
            return
        events = self._run.fits[int(line.get("fit", 1))]
        del events[:-1]  # the last event is needed to place the next one
        for event in without(events, self._ignored):
            fields = different_fields(next(self._expected, None), event)
            if fields is not None:
                self._is_over = True
                # Later events help to name the cause of a difference in other kinds of events, so those don't stop the
                # run yet.
                self.is_different = not fields or event.kind in (*STEPS, ledger.LOG)


def _first_of_rank(rank: int, expected: list[Event], found: list[Event]) -> Mismatch | None:
    numbers = dict.fromkeys(STEPS, 0)
    for index in range(max(len(expected), len(found))):
        one = expected[index] if index < len(expected) else None
        other = found[index] if index < len(found) else None
        fields = different_fields(one, other)
        if fields is not None:
            return Mismatch(
                rank=rank,
                expected=one,
                found=other,
                fields=fields,
                number=numbers[ledger.BATCH],
                num_evaluated=numbers[ledger.EVALUATED],
                expected_next=expected[index + 1 :],
                found_next=found[index + 1 :],
            )
        if one is not None and one.kind in STEPS:
            numbers[one.kind] += 1
    return None


def different_fields(one: Event | None, other: Event | None) -> tuple[str, ...] | None:
    """Return the names of the values that differ; empty if the events don't correspond, None if they are equal."""
    if one is None or other is None or (one.kind, one.fit) != (other.kind, other.fit):
        return ()
    if one.values == other.values:
        return None
    if one.place != other.place:
        return ()
    names = [name for name in {**one.values, **other.values} if one.values.get(name) != other.values.get(name)]
    return tuple(sorted(names, key=lambda name: _FIELDS.index(name) if name in _FIELDS else len(_FIELDS)))


def without(events: Sequence[Event], ignored: Sequence[str]) -> list[Event]:
    """Return the events without the ignored logged values. Drop an event that logs no others.

    Args:
        events: Events of a run.
        ignored: Patterns of the ignored names.
    """
    if not ignored:
        return list(events)
    return [kept for event in events if (kept := _event_without(event, ignored)) is not None]


def _event_without(event: Event, ignored: Sequence[str]) -> Event | None:
    metrics = event.values.get("metrics")
    if not isinstance(metrics, Mapping):
        return event
    kept = {
        name: value
        for name, value in metrics.items()
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in ignored)
    }
    if len(kept) == len(metrics):
        return event
    if not kept and event.kind == ledger.LOG:
        return None
    return replace(event, values={**event.values, "metrics": kept})


def _batches(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.kind in STEPS]


def difference_of(mismatch: Mismatch) -> Difference:
    """Return a mismatch in the form in which it is shown."""
    one, other = mismatch.expected, mismatch.found
    shown = one if one is not None else other
    assert shown is not None
    if one is None or other is None or not mismatch.fields:
        texts = ["nothing, the run had ended" if event is None else str(event) for event in (one, other)]
        values: tuple[Value, ...] = (Value(name="what comes next", expected=texts[0], found=texts[1]),)
        equal: tuple[str, ...] = ()
    else:
        values = tuple(
            value for name in mismatch.fields for value in _values(name, one.values.get(name), other.values.get(name))
        )
        equal = tuple(
            _NAMES.get(name) or name
            for name in _FIELDS
            if name in one.values and name not in mismatch.fields and one.values[name] is not None and name != "step"
        )
    return Difference(
        place=str(shown),
        number=mismatch.number,
        rank=mismatch.rank,
        values=values,
        equal=equal,
        num_equal=mismatch.number,
        num_evaluated_equal=mismatch.num_evaluated,
        process=max(mismatch.process, 0),
    )


def _values(name: str, expected: object, found: object) -> list[Value]:
    """Return the leaves that differ between two values."""
    if expected == found:
        return []
    shown = _NAMES.get(name, name)
    both: list[Mapping[object, object]] = []
    for value in (expected, found):
        if isinstance(value, Mapping):
            both.append(value)
        elif isinstance(value, list):
            both.append(dict(enumerate(value)))
    if len(both) == 2:
        keys = {**both[0], **both[1]}
        return [
            leaf
            for key in keys
            for leaf in _values(f"{shown} {key}".strip(), both[0].get(key, "none"), both[1].get(key, "none"))
        ]
    return [Value(name=shown, expected=shown_value(expected), found=shown_value(found))]


def shown_value(value: object) -> str:
    """Return a value of a ledger as readable text. A number is written in decimals, to the last digit.

    Args:
        value: The value as in the ledger.

    Example:
        >>> shown_value((0.1).hex()), shown_value(None), shown_value("9f3c")
        ('0.1', 'none', '9f3c')
    """
    number = number_of(value) if isinstance(value, str) else None
    if number is not None:
        return repr(number)
    return "none" if value is None else str(value)


def number_of(value: object) -> float | None:
    """Return a number that the ledger has as text, or None if the text is not a number.

    Args:
        value: The value as in the ledger.

    Example:
        >>> number_of((0.1).hex()), number_of("nan"), number_of("9f3c")
        (0.1, nan, None)
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, str) and (value.lstrip("-").startswith("0x") or value.lstrip("-") in ("inf", "nan")):
        try:
            return float.fromhex(value)
        except ValueError:
            return None
    return None
