"""Follows an iterable that has no state, and brings another process to the same position by a replay.

In a replay, iterations begin again, and the batches already drawn are drawn again and dropped. A chain is everything
that is drawn again: one iteration, or several if one depends on what those before it left. An iterator that persists
from one to the next can't be copied, so the chain begins where it was created.

If a new iteration can begin from the loader's objects, only that iteration is drawn again. Right at its beginning it
has nothing to compare, so the one before it is drawn again, too. If an iterator, a thread, or something that a
checkpoint can't carry persists in the loader, everything since its creation is drawn again.

A ``DataLoader`` class of the user's with its own ``__iter__`` is such an iterable, too: it may read ahead in a thread,
count, or keep an iterator.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators
from lightning_faulttolerant.loader.index_record import RandomStates
from lightning_faulttolerant.loader.objects import LiveObjects, digest_of, torch_loaders_in
from lightning_faulttolerant.loader.samplers import DrawLog
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.saved import LOST, NODES
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

_KEPT_DIGESTS = 8  # of the batches fetched, at most the last one is not trained yet


@dataclass(kw_only=True, slots=True)
class ChainIteration:
    """One iteration of a chain. Its first step creates the iterator. Each batch is a step, and so is the end.

    ``num_before`` is the number of steps before it in the chain. ``objects`` holds the changes on the loader's objects
    at that time. ``first`` holds them right before its first batch, if they differ: a generator function starts late.
    ``digests`` holds the last digests of all that the chain yielded, by the number of batches of this iteration.
    """

    num_before: int = 0
    objects: Mapping[str, object] = field(default_factory=dict)
    first: Mapping[str, object] = field(default_factory=dict)
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
            "been fetched by now. Its batches could not continue exactly."
        )


@dataclass(kw_only=True, slots=True)
class Chain:
    """Iterations in sequence.

    Args:
        start: The states from which the first iteration began.
        log: Where other code drew from the generators in between, by step.
        runs: The iterations.
        attributes: The values that other code gave the loader's attributes right before a step, by the step.
    """

    start: RandomStates
    log: DrawLog = field(default_factory=DrawLog)
    runs: list[ChainIteration] = field(default_factory=list)
    attributes: dict[int, Mapping[str, object]] = field(default_factory=dict)

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

    def state_dict(self, run: ChainIteration, consumed: int | None) -> dict[str, object]:
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
            "attributes": {step: values for step, values in self.attributes.items() if step < num_steps},
            "runs": [[one.num_out, one.has_ended] for one in before] + [[num_last, has_ended]],
            "objects": [dict(one.objects) for one in (*before, run)],
            "first": [dict(one.first) for one in (*before, run)],
            "digest": run.digest_after(num_last),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Chain:
        """Return a chain that has drawn nothing yet."""
        start, log = RandomStates(**state["start"]), DrawLog(state["log"])
        return cls(start=start, log=log, attributes=dict(state["attributes"]))

    def play(
        self,
        state: Mapping[str, Any],
        make_iterator: Callable[[], Iterator[object]],
        *,
        now: Callable[[], Mapping[str, bytes]],
        restore: Callable[[RandomStates], None],
        load_objects: Callable[[Mapping[str, object]], None],
        attributes: dict[str, object],
    ) -> tuple[Iterator[object], bool]:
        """Draw the batches of `state_dict` again; return the last iterator, and whether the result is the same."""
        noted = self.log.by_batch()
        upcoming = next(noted, None)

        def step(number: int) -> None:
            nonlocal upcoming
            if upcoming is not None and upcoming[0] == number:
                restore(RandomStates.from_states(upcoming[1](now())))
                upcoming = next(noted, None)
            attributes.update(self.attributes.get(number, {}))

        restore(self.start)
        batches: Iterator[object] = iter(())
        begun = zip(state["runs"], state["objects"], state["first"], strict=True)
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
_PLAIN = (bool, int, float, str)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayedIteration:
    """One iteration: its places in the chains that it belongs to, the longest chain first."""

    places: tuple[tuple[Chain, ChainIteration], ...]

    @property
    def num_out(self) -> int:
        """The number of batches that it has yielded."""
        return self.places[0][1].num_out

    def place_to_compare(self, consumed: int | None) -> tuple[Chain, ChainIteration]:
        """Return the shortest chain that has a batch to compare after this many batches."""
        num_batches = self.num_out if consumed is None else consumed
        return self.places[-1] if num_batches else self.places[0]

    def note_first(self, objects: Mapping[str, object]) -> None:
        """Note the changes on the loader's objects right before the first batch."""
        for _, run in self.places:
            run.first = objects if digest_of(objects) != digest_of(run.objects) else {}

    def note(self, batch: object, before: RandomStates, after: RandomStates) -> None:
        """Note a batch, and the moments before and after it was drawn."""
        for chain, _ in self.places:
            chain.note(batch, before, after)

    def note_end(self, before: RandomStates, after: RandomStates) -> None:
        """Note its end, and the moments before and after the end was found."""
        for chain, _ in self.places:
            chain.note_end(before, after)


class Replayer:
    """Follows one iterable.

    Args:
        loader: The user's loader.
        name: Its name in messages.
        exactness: Collects what is not exact.
        older: The replayers of the fit's other loaders that were created before.
    """

    def __init__(self, loader: object, *, name: str, exactness: Exactness, older: Iterable[Replayer] = ()) -> None:
        self._name = name
        self._resumed: tuple[Iterator[object], ReplayedIteration] | None = None
        self._exactness = exactness
        self.held = HeldGenerators({"loader": loader})
        self.objects: LiveObjects = LiveObjects(loader, older=[other.objects for other in older])
        self._loads_here = any(not one.num_workers for one in torch_loaders_in(loader).values())
        self._has_thread = False
        self._attributes: dict[str, object] = getattr(loader, "__dict__", {})
        self._known: dict[str, object] = {}
        self.iteration: ReplayedIteration | None = None

    @contextmanager
    def noting_threads(self) -> Iterator[None]:
        """Note whether the block starts a thread that loads data in this process, while training continues.

        Other threads may start some of their own meanwhile.
        """
        own, original = threading.get_ident(), threading.Thread.start

        def start(thread: threading.Thread) -> None:
            self._has_thread |= self._loads_here and threading.get_ident() == own
            original(thread)

        threading.Thread.start = start  # type: ignore[assignment]
        try:
            yield
        finally:
            threading.Thread.start = original  # type: ignore[method-assign]

    def check_thread(self, before: RandomStates, after: RandomStates, *, is_first: bool) -> None:
        """Refuse a loader whose thread has drawn random numbers between these moments, or changed its data set."""
        if not self._has_thread:
            return
        # The first batch is preceded by the seeds of the sampler and of torch's iterator.
        drawn, held = before.drawn_until(after, num_seeds=2 * is_first)
        changed = [path for path in (*held, *self.objects.state_dict().get(NODES, ())) if ".dataset" in path]
        if drawn or changed:
            self._exactness.refuse(
                f"{self._name} can't be resumed exactly: a thread of it loads the next samples while training "
                f"continues, and how far {(*drawn, *changed)[0]} has come can't be restored. Pass num_workers=1: then "
                "a process loads them. Or pass strict=False."
            )

    def iterate(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Begin an iteration, or continue the one that was resumed."""
        resumed, self._resumed = self._resumed, None
        batches, iteration = resumed or self._begun(make_iterator)
        return ReplayedBatches(batches, self, iteration)

    def _begun(self, make_iterator: Callable[[], Iterator[object]]) -> tuple[Iterator[object], ReplayedIteration]:
        objects = self.objects.at_start()
        now = replace(self.moment(), objects=objects)
        chains = [] if self.iteration is None else [self.iteration.place_to_compare(None)[0]]
        if not chains or not (objects.get(LOST) or self.objects.live()):
            chains.append(Chain(start=now))
        iteration = ReplayedIteration(places=tuple((chain, chain.begin(objects)) for chain in chains))
        self.iteration = iteration
        with self.noting_threads():
            batches = make_iterator()
        after = self.moment()
        for chain in chains:
            chain.log.note(chain.runs[-1].num_before, now.states(), after.states())
        return batches, iteration

    def state_dict(self, consumed: int | None, iteration: ReplayedIteration | None = None) -> dict[str, object]:
        """Return the position.

        Args:
            consumed: The number of consumed batches of the iteration; ``None`` between iterations.
            iteration: The iteration; the last one by default.

        Raises:
            NotExactError: If that position is no longer known.
        """
        iteration = iteration or self.iteration
        state: dict[str, object] = {"consumed": consumed, "now": self.objects.state_dict(), "chain": None}
        if iteration is None:
            return {**state, "consumed": None}
        chain, run = iteration.place_to_compare(consumed)
        return {**state, "chain": chain.state_dict(run, consumed)}

    def load_state_dict(self, state: Mapping[str, Any], make_iterator: Callable[[], Iterator[object]]) -> None:
        """Draw everything again up to a position of `state_dict`, and let the next iteration continue from there."""
        self._resumed = None
        chain = state["chain"]
        begun = [chain["start"].get("objects", {}), *chain["objects"], *chain.get("first", ())] if chain else []
        self.objects.begin_load(*begun, state["now"])
        if chain is not None:
            before = rng_state()
            try:
                with self.objects.globals_kept(*begun):
                    played = self._played(chain, make_iterator)
            finally:
                set_rng_state(before)
            self._resumed = None if state["consumed"] is None else played
        self._load(state["now"])
        self.held.refresh()

    def _played(
        self, state: Mapping[str, Any], make_iterator: Callable[[], Iterator[object]]
    ) -> tuple[Iterator[object], ReplayedIteration]:
        num_batches = sum(num_out for num_out, _ in state["runs"])
        _log.info("%s draws %s consumed batches again.", self._name, num_batches)
        chain = Chain.from_state_dict(state)
        batches, is_same = chain.play(
            state,
            make_iterator,
            now=lambda: self.moment().states(),
            restore=self._restore,
            load_objects=self._load,
            attributes=self._attributes,
        )
        self.note_attributes()  # from here on, what changes is training's
        if not is_same:
            self._differs(num_batches, chain.num_batches)
        iteration = ReplayedIteration(places=((chain, chain.runs[-1]),))
        self.iteration = iteration
        return batches, iteration

    def _differs(self, num_before: int, num_now: int) -> None:
        how = f"only {num_now} of the" if num_now < num_before else "others than the"
        message = (
            f"Started again from the same random states, {self._name} yields {how} {num_before} batches that it "
            "yielded before. It keeps hidden state, its data changed, or it yields what training puts into it. Its "
            "batches would differ from the uninterrupted run. Give its class state_dict and load_state_dict, or "
            "derive its order from a seed; or pass strict=False."
        )
        self._exactness.refuse(message)

    def moment(self) -> RandomStates:
        """Return the current random states."""
        self.held.refresh()
        return RandomStates(rng=rng_state(), held=self.held.state_dict(), sampler_epochs=[])

    def _restore(self, moment: RandomStates) -> None:
        set_rng_state(moment.rng)
        self._load(moment.objects)
        missing = self.held.load_state_dict(moment.held) if moment.held else []
        if missing:
            reason = f"{self._name} can't begin again exactly: {lacks_generators(missing)}"
            self._exactness.refuse(reason)

    def _load(self, objects: Mapping[str, object]) -> None:
        for line in self.objects.load_state_dict(objects):
            self._exactness.refuse(f"{self._name} continues without {line}")

    def note_attributes(self) -> dict[str, object]:
        """Note the plain attributes of the loader. Return those that are others than at the last call."""
        before, now = self._known, {name: one for name, one in self._attributes.items() if type(one) in _PLAIN}
        self._known = now
        return {name: one for name, one in now.items() if name not in before or before[name] != one}

    def live(self) -> list[object]:
        """Return the iterators and similar objects in the loader, which a replay creates again."""
        return list(self.objects.live().values())


class ReplayedBatches(Iterator[object]):
    """Passes on the batches of the user's iterator, and notes each batch."""

    def __init__(self, batches: Iterator[object], replayer: Replayer, iteration: ReplayedIteration) -> None:
        self._batches = batches
        self._replayer = replayer
        self._iteration = iteration

    def __next__(self) -> object:
        is_first = not self._iteration.num_out
        changed = self._replayer.note_attributes()
        if is_first:
            self._iteration.note_first(self._replayer.objects.at_start())
        for chain, run in self._iteration.places if changed and not is_first else ():
            chain.attributes[run.num_steps] = changed
        before = self._replayer.moment()
        try:
            with self._replayer.noting_threads() if is_first else nullcontext():
                batch = next(self._batches)
        except StopIteration:
            self._iteration.note_end(before, self._replayer.moment())
            raise
        after = self._replayer.moment()
        self._replayer.note_attributes()
        self._replayer.check_thread(before, after, is_first=is_first)
        self._iteration.note(batch, before, after)
        return batch
