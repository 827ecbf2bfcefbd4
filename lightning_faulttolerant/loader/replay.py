"""Iterations that are resumed by a replay: begun again, and what was drawn of them is drawn again and dropped.

A chain is all that is drawn again: one iteration, or several where one follows from what those before it left behind.
An iterator that lives on from one to the next can't be copied, so the chain begins where it was made.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.draws import DrawLog
from lightning_faulttolerant.loader.index_record import Moment
from lightning_faulttolerant.loader.sample_digest import sample_digest

_KEPT_DIGESTS = 8  # the trainer is at most one batch behind what was fetched


@dataclass(kw_only=True, slots=True)
class Run:
    """One iteration of a chain: its first step makes the iterator, each batch is one more, and so is its end.

    ``num_before`` are the steps of the chain before it, ``objects`` what had changed on the loader's objects then.
    ``first`` is the same right before its first batch, if that differs: a generator begins late.
    ``digests`` are the last ones of all that the chain gave, by the number of batches of this iteration.
    """

    num_before: int = 0
    objects: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] = field(default_factory=dict)
    num_out: int = 0
    has_ended: bool = False
    digests: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT_DIGESTS))

    @property
    def num_steps(self) -> int:
        """How many steps the chain has up to the last one of this iteration."""
        return self.num_before + 1 + self.num_out + self.has_ended

    def digest_after(self, num_batches: int) -> int:
        """Return the digest of all that the chain gave up to a batch of this iteration.

        Raises:
            NotExactError: If that is not known any more.
        """
        for count, digest in self.digests:
            if count == num_batches:
                return digest
        raise NotExactError(
            f"Where a loader was after {num_batches} batches is not known any more: {self.num_out} were fetched"
            " meanwhile. Its batches could not continue exactly."
        )


@dataclass(kw_only=True, slots=True)
class Chain:
    """Iterations one after the other.

    Args:
        start: The states from which the first of them was begun.
        log: Where others drew from the generators in between, by step.
        runs: The iterations.
    """

    start: Moment
    log: DrawLog = field(default_factory=DrawLog)
    runs: list[Run] = field(default_factory=list)

    @property
    def num_batches(self) -> int:
        """How many batches it has given."""
        return sum(run.num_out for run in self.runs)

    def begin(self, objects: Mapping[str, Any]) -> Run:
        """Note that an iteration is begun now."""
        last = self.runs[-1] if self.runs else None
        run = Run(num_before=0 if last is None else last.num_steps, objects=objects)
        run.digests.append((0, 0 if last is None else last.digests[-1][1]))
        self.runs.append(run)
        return run

    def note_iterator(self, before: Moment, after: Moment) -> None:
        """Note the moments before and after the last iteration's iterator was made."""
        self.log.note(self.runs[-1].num_before, before.states(), after.states())

    def note(self, batch: Any, before: Moment, after: Moment) -> None:
        """Note a batch of the last iteration, and the moments before and after it was drawn."""
        run = self.runs[-1]
        self.log.note(run.num_steps, before.states(), after.states())
        self._count(run, batch)

    def note_end(self, before: Moment, after: Moment) -> None:
        """Note the end of the last iteration, and the moments before and after it was found."""
        run = self.runs[-1]
        if not run.has_ended:
            self.log.note(run.num_steps, before.states(), after.states())
            run.has_ended = True

    def _count(self, run: Run, batch: Any) -> None:
        run.num_out += 1
        run.digests.append((run.num_out, sample_digest(batch, run.digests[-1][1])))

    def state_dict(self, run: Run, consumed: int | None) -> dict[str, Any]:
        """Return what `play` needs to draw everything again up to a place.

        Args:
            run: The last iteration that counts.
            consumed: How many of its batches do; ``None`` for all of it, its end included.
        """
        num_last, has_ended = (run.num_out, run.has_ended) if consumed is None else (consumed, False)
        before = self.runs[: self.runs.index(run)]
        num_steps = run.num_before + 1 + num_last + has_ended
        return {
            "start": self.start.state_dict(),
            "log": self.log.until(num_steps).pack(),
            "runs": [[one.num_out, one.has_ended] for one in before] + [[num_last, has_ended]],
            "objects": [dict(one.objects) for one in (*before, run)],
            "first": [dict(one.first) for one in (*before, run)],
            "digest": run.digest_after(num_last),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Chain:
        """Return a chain of which nothing is drawn yet."""
        return cls(start=Moment(**state["start"]), log=DrawLog(state["log"]))

    def play(
        self,
        state: Mapping[str, Any],
        make_iterator: Callable[[], Iterator[Any]],
        *,
        restore: Callable[[Moment], None],
        load_objects: Callable[[Mapping[str, Any]], None],
    ) -> tuple[Iterator[Any], bool]:
        """Draw again what `state_dict` told of; return the last iterator, and whether the same came of it."""
        noted = self.log.states()
        upcoming = next(noted, None)

        def step(number: int) -> None:
            nonlocal upcoming
            if upcoming is not None and upcoming[0] == number:
                restore(Moment.from_states(upcoming[1]))
                upcoming = next(noted, None)

        restore(self.start)
        batches: Iterator[Any] = iter(())
        late = state.get("first", [{}] * len(state["runs"]))  # older checkpoints have none
        begun = zip(state["runs"], state["objects"], late, strict=True)
        for number, ((num_out, has_ended), objects, first) in enumerate(begun):
            if number:
                load_objects(objects)
            run = self.begin(objects)
            step(run.num_before)
            batches = make_iterator()
            run.first = first
            if num_out or has_ended:
                load_objects(first)
            for _ in range(num_out):
                step(run.num_steps)
                try:
                    self._count(run, next(batches))
                except StopIteration:
                    return batches, False
            if has_ended:
                step(run.num_steps)
                if next(batches, _NONE) is not _NONE:
                    return batches, False
                run.has_ended = True
        return batches, self.runs[-1].digests[-1][1] == state["digest"]


_NONE = object()
