"""Iterations resumed by a replay: each begins again, and the batches already drawn are drawn again and dropped.

A chain is everything that is drawn again: one iteration, or several if one depends on what those before it left.
An iterator that persists from one to the next can't be copied, so the chain begins where it was created.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.draws import DrawLog
from lightning_faulttolerant.loader.index_record import RandomStates
from lightning_faulttolerant.loader.sample_digest import sample_digest

_KEPT_DIGESTS = 8  # the trainer is at most one batch behind what was fetched


@dataclass(kw_only=True, slots=True)
class ChainIteration:
    """One iteration of a chain. Its first step creates the iterator. Each batch is a step, and so is the end.

    ``num_before`` is the number of steps before it in the chain. ``objects`` holds the changes on the loader's objects
    at that time. ``first`` holds them right before its first batch, if they differ: a generator function starts late.
    ``digests`` holds the last digests of all that the chain yielded, by the number of batches of this iteration.
    """

    num_before: int = 0
    objects: Mapping[str, Any] = field(default_factory=dict)
    first: Mapping[str, Any] = field(default_factory=dict)
    num_out: int = 0
    has_ended: bool = False
    digests: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT_DIGESTS))

    @property
    def num_steps(self) -> int:
        """The number of steps in the chain up to the last one of this iteration."""
        return self.num_before + 1 + self.num_out + self.has_ended

    def digest_after(self, num_batches: int) -> int:
        """Return the digest of all that the chain yielded up to a batch of this iteration.

        Raises:
            NotExactError: If the digest is no longer known.
        """
        for count, digest in self.digests:
            if count == num_batches:
                return digest
        raise NotExactError(
            f"The position of a loader after {num_batches} batches is no longer known, because {self.num_out} have "
            "been fetched since. Its batches could not continue exactly."
        )


@dataclass(kw_only=True, slots=True)
class Chain:
    """Iterations in sequence.

    Args:
        start: The states from which the first iteration began.
        log: Where other code drew from the generators in between, by step.
        runs: The iterations.
    """

    start: RandomStates
    log: DrawLog = field(default_factory=DrawLog)
    runs: list[ChainIteration] = field(default_factory=list)

    @property
    def num_batches(self) -> int:
        """The number of batches it has yielded."""
        return sum(run.num_out for run in self.runs)

    def begin(self, objects: Mapping[str, object]) -> ChainIteration:
        """Note that an iteration begins now."""
        last = self.runs[-1] if self.runs else None
        run = ChainIteration(num_before=0 if last is None else last.num_steps, objects=objects)
        run.digests.append((0, 0 if last is None else last.digests[-1][1]))
        self.runs.append(run)
        return run

    def note_iterator(self, before: RandomStates, after: RandomStates) -> None:
        """Note the moments before and after the last iteration's iterator was created."""
        self.log.note(self.runs[-1].num_before, before.states(), after.states())

    def note(self, batch: object, before: RandomStates, after: RandomStates) -> None:
        """Note a batch of the last iteration, and the moments before and after it was drawn."""
        run = self.runs[-1]
        self.log.note(run.num_steps, before.states(), after.states())
        self._count(run, batch)

    def note_end(self, before: RandomStates, after: RandomStates) -> None:
        """Note the end of the last iteration, and the moments before and after the end was found."""
        run = self.runs[-1]
        if not run.has_ended:
            self.log.note(run.num_steps, before.states(), after.states())
            run.has_ended = True

    def _count(self, run: ChainIteration, batch: object) -> None:
        run.num_out += 1
        run.digests.append((run.num_out, sample_digest(batch, run.digests[-1][1])))

    def state_dict(self, run: ChainIteration, consumed: int | None) -> dict[str, Any]:
        """Return the state that `play` needs to draw everything again up to a position.

        Args:
            run: The last iteration that counts.
            consumed: The number of its batches that count; ``None`` for all of them and its end.
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
        """Return a chain that has drawn nothing yet."""
        return cls(start=RandomStates(**state["start"]), log=DrawLog(state["log"]))

    def play(
        self,
        state: Mapping[str, Any],
        make_iterator: Callable[[], Iterator[object]],
        *,
        restore: Callable[[RandomStates], None],
        load_objects: Callable[[Mapping[str, object]], None],
    ) -> tuple[Iterator[object], bool]:
        """Draw the batches of `state_dict` again; return the last iterator, and whether the result is the same."""
        noted = self.log.states()
        upcoming = next(noted, None)

        def step(number: int) -> None:
            nonlocal upcoming
            if upcoming is not None and upcoming[0] == number:
                restore(RandomStates.from_states(upcoming[1]))
                upcoming = next(noted, None)

        restore(self.start)
        batches: Iterator[object] = iter(())
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
