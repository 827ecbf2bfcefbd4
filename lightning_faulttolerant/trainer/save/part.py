"""A part of a run's state: when a state has it, and how it is read, restored, compared, and given to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The instant at which a state is read.

    Args:
        where: The place in the run.
        is_fit: Whether a fit is in progress, and not ``validate``, ``test``, or ``predict``.
        is_iterating: Whether the next batch comes from the iterators that the training loaders have here.
        is_evaluating: Whether a validation run or an evaluation is in progress.
        has_gradients: Whether gradients are part of the state.
        strict: Whether what a checkpoint can't carry is an error.
        state: The parts that have been read.
    """

    where: str
    is_fit: bool
    is_iterating: bool
    is_evaluating: bool
    has_gradients: bool
    strict: bool
    state: dict[str, Any] = field(default_factory=dict)


ALIKE, MERGED, GONE = "alike", "merged", "gone"
"""What a different number of ranks gets: the value of rank 0, one that is made of those of all ranks, or none."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a run's state.

    Args:
        name: Its key in the state.
        title: Its name in reports; empty if they don't mention it.
        read: Reads it; ``None`` if it is known only when the checkpoint is written.
        load: Restores it, and may return a line for each thing that no longer exists; ``None`` if it is restored
            earlier, where it is needed.
        when: Whether a state of this moment has it.
        for_others: What a different number of ranks gets: `ALIKE`, `MERGED`, or `GONE`.
        compare: What `compared` does; ``None`` if the result of `read` has that form.
        derived: The keys in it that depend on the process or the clock: they are not compared.
        is_read_back: Whether a resume compares it with the live objects.
        remarks: Returns what its value, which may be empty, tells whoever inspects the checkpoint: texts, each with its
            label.
    """

    name: str
    title: str
    read: Callable[[Any, Moment], Any] | None
    load: Callable[[Any, Any], list[str] | None] | None = None
    when: Callable[[Moment], bool] = lambda at: True
    for_others: str = ALIKE
    compare: Callable[[Any, Moment, Any], tuple[object, object]] | None = None
    derived: frozenset[str] = frozenset()
    is_read_back: bool = True
    remarks: Callable[[Any], Mapping[str, str]] = lambda value: {}

    def compared(self, run: Any, at: Moment, saved: Any) -> tuple[object, object]:
        """Return its value in a checkpoint and the live one, in a form in which equal values are equal."""
        if self.compare is not None:
            return self.compare(run, at, saved)
        assert self.read is not None
        return saved, self.read(run, at)


def for_other_ranks(parts: Iterable[Part], first: Mapping[str, Any], merged: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one rank of a different number of ranks.

    Args:
        parts: All parts.
        first: The state of rank 0.
        merged: The parts that are made of those of all ranks.
    """
    kinds = {part.name: part.for_others for part in parts if part.name in first}
    return {name: merged[name] if kind == MERGED else first[name] for name, kind in kinds.items() if kind != GONE}
