"""Brings a sampler to its position: the states that its order follows from, and the batches that it has yielded.

The states are the random states, the epochs of samplers with ``set_epoch``, and the loader's own objects. The batches
are drawn again, and must be the same.

A running digest compares all of them, so a sampler is also detected if only its last batches happen to be the same. A
sampler that is skipped without a walk over its batches is checked by the inputs of its order: the generator's state, or
seed and epoch, and its length. Its last batches are compared as well.

torch's and this package's samplers are not walked through: `rest_of` starts at the position. This package's samplers
compute the index at any position. The order of torch's samplers is created as torch creates it, from the same
generators. The unneeded indices are left out before they become Python numbers. With 10 million samples, that saves
most of the time. torch may change how it draws, so the caller must compare the batches with earlier ones. Samplers with
weights or with their own indices are run through: those may have changed, and all batches are compared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_faulttolerant.loader.digests import START, updated
from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators
from lightning_faulttolerant.loader.index_record import IndexPlan, NotKept, RandomStates, pack_indices, states_now
from lightning_faulttolerant.loader.objects import LoaderObjects, of_workers_in
from lightning_faulttolerant.loader.samplers import (
    DrawLog,
    draws_only_at_its_start,
    epochs_of,
    generators_of,
    is_interruptible,
    order_follows_from_start,
    put_epochs,
)
from lightning_faulttolerant.samplers.order import EpochPart, drawn_permutation, indices_of, order_of
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import rng_state, set_rng_state, torch_rng_state

_CHUNK = 16_384


class SamplerStates:
    """Reads and restores the states of one loader's sampler.

    Args:
        sampler: The loader's sampler.
        held: Generators that the sampler may draw from besides the global ones.
        exactness: Collects what can't be restored.
        is_endless: Whether the sampler is torch's for an iterable data set, which yields no indices.
        objects: Tracks what iterating changes on the loader's objects.
    """

    def __init__(
        self,
        sampler: Iterable[object],
        *,
        held: HeldGenerators,
        exactness: Exactness,
        is_endless: bool,
        objects: LoaderObjects | None,
    ) -> None:
        self._sampler = sampler
        self.held = held
        """Generators that the sampler may draw from besides the global ones."""
        self._exactness = exactness
        self._is_endless = is_endless
        self._objects = objects
        self.may_draw = not is_endless and not draws_only_at_its_start(sampler)
        """Whether the sampler may draw random numbers in the middle of an iteration."""

    def now(self) -> RandomStates:
        """Return the current random states."""
        return RandomStates(rng=rng_state(), held=self.held.state_dict(), sampler_epochs=self._epochs())

    def at_start(self, before: RandomStates | None = None) -> RandomStates:
        """Return those current states that the sampler may draw from when it starts.

        Args:
            before: An earlier moment. Only torch's own code ran since then, and it changes no objects.
        """
        objects = self._objects.of_start() if self._objects is not None and before is None else {}
        objects = objects if before is None else dict(before.objects)
        if self.may_draw:
            return replace(self.now(), objects=objects)
        # torch's own samplers draw from torch's generator or from one passed to them.
        held = self.held.state_dict(of=generators_of(self._sampler))
        return RandomStates(rng=torch_rng_state(), held=held, sampler_epochs=self._epochs(), objects=objects)

    def at_birth(self, start: RandomStates, *, is_resumed: bool) -> RandomStates:
        """Return the current states, with the changes on the objects that workers copy.

        Args:
            start: The moment when the sampler starts.
            is_resumed: Whether the iteration is resumed: `start` then has no objects.
        """
        objects: Mapping[str, object] = {}
        if self._objects is not None:
            knows = not is_resumed and not self._is_endless
            objects = of_workers_in(start.objects) if knows else self._objects.of_workers()
        return replace(self.now(), objects=objects)

    def restore(self, moment: RandomStates) -> list[str]:
        """Restore the random states of `moment`; return the paths of generators that are missing."""
        set_rng_state(moment.rng)
        missing = self.held.load_state_dict(moment.held) if moment.held else []
        put_epochs(self._samplers_with_epoch(), moment.sampler_epochs)
        return missing

    def go_back_to(self, moment: RandomStates) -> None:
        """Restore all the states of a process that is gone."""
        missing = self.restore(moment)
        if self._objects is not None:
            missing += self._objects.load(moment.objects)
        if missing:
            self._exactness.refuse(f"The order of samples can't begin again exactly: {lacks_generators(missing)}")

    def own_progress(self) -> list[object]:
        """Return the positions that this package's samplers keep: the user may advance them."""
        return [s.progress_state() if is_interruptible(s) else None for s in self._samplers_with_epoch()]

    def load_own_progress(self, states: Sequence[object]) -> None:
        """Set this package's samplers to the positions that `own_progress` returned."""
        put_epochs(self._samplers_with_epoch(), states)

    def _epochs(self) -> list[object]:
        return epochs_of(self._samplers_with_epoch())

    def _samplers_with_epoch(self) -> list[Any]:
        chain = (self._sampler, getattr(self._sampler, "sampler", None))
        return [s for s in chain if callable(getattr(s, "set_epoch", None))]


class Replay:
    """Draws the batches of a sampler again.

    Args:
        sampler: The loader's sampler.
        plan: The position to reach.
    """

    def __init__(self, sampler: object, plan: IndexPlan) -> None:
        self._sampler = sampler
        self._plan = plan
        self._num_known = plan.handed_out - len(plan.recent)
        self.is_same = True
        """Whether the sampler has yielded the same as before."""
        self.not_compared: set[str] = set()
        """The names of objects in the batches that can't be distinguished from others of their kind."""

    def skipped(self) -> Iterator[object] | None:
        """Return the batches after the position, or ``None`` if the sampler has to be run through."""
        plan, num_known = self._plan, self._num_known
        if not num_known or plan.log or any(isinstance(batch, NotKept) for batch in plan.recent):
            return None
        indices = rest_of(self._sampler, num_known - 1)
        if indices is None:
            return None
        next(indices, None)  # draw now what it draws at its beginning, even if nothing is yielded again
        again = list(islice(indices, len(plan.recent)))
        return self._rest(again, indices) if self._is_recent(again) else None

    def run_through(self, indices: Iterator[object], states: SamplerStates) -> Iterator[object]:
        """Return the batches after the position of an iterator that has just been started.

        Args:
            indices: The sampler's iterator.
            states: Reads and restores the states that it draws from.
        """
        indices = map(next, repeat(indices))  # `iter` would restart a sampler that is its own iterator
        again: deque[object] = deque(maxlen=len(self._plan.recent))
        digest, num_drawn = START, 0
        for batch in self._drawn(indices, states):
            digest = updated(digest, batch, self.not_compared)
            num_drawn += 1
            again.append(batch)
        found, expected = list(again), self._plan.digest
        self.is_same = num_drawn == self._plan.handed_out and (
            self._is_recent(found) if expected is None else digest == expected
        )
        return self._rest(found, indices)

    def _drawn(self, indices: Iterator[object], states: SamplerStates) -> Iterator[object]:
        num_drawn = 0
        for number, states_after in DrawLog(self._plan.log).by_batch():
            yield from islice(indices, number - num_drawn)
            num_drawn = number
            states.go_back_to(RandomStates.from_states(states_after(states_now(states.held))))
        yield from islice(indices, self._plan.handed_out - num_drawn)

    def _is_recent(self, again: list[object]) -> bool:
        return pack_indices(again) == pack_indices(list(self._plan.recent))

    def _rest(self, again: list[object], indices: Iterator[object]) -> Iterator[object]:
        kept = list(self._plan.recent)
        if any(isinstance(batch, NotKept) for batch in kept):
            kept = again
        return chain(kept[self._plan.position - self._num_known :], indices)


def rest_of(sampler: object, num_batches: int) -> Iterator[object] | None:
    """Return the batches of `sampler` after the first `num_batches`, or ``None`` if it can't be skipped.

    The generators must be in the state for its first index. The first ``next`` advances them as `sampler` itself would.
    A sampler without batching counts indices.
    """
    if type(sampler) is not BatchSampler:
        return _rest(sampler, num_batches)
    inner = _rest(sampler.sampler, num_batches * sampler.batch_size)
    if inner is None:
        return None
    return iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))


def _rest(sampler: Any, num_indices: int) -> Iterator[Any] | None:
    if is_interruptible(sampler):
        rest: Iterator[object] = sampler.iter_from(num_indices)
        return rest
    skip = _SKIPS.get(type(sampler))
    if skip is None or not order_follows_from_start(sampler) or num_indices > len(sampler):
        return None
    return skip(sampler, num_indices)


def _random(sampler: RandomSampler, num_indices: int) -> Iterator[int]:
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    length = len(sampler.data_source)
    is_on_cpu = generator.device.type == "cpu"  # another device draws other numbers for another type
    order = drawn_permutation(length, generator) if is_on_cpu else torch.randperm(length, generator=generator)
    rest = order[num_indices:].clone()  # the whole is no longer needed
    del order
    for start in range(0, len(rest), _CHUNK):
        yield from rest[start : start + _CHUNK].tolist()
    # torch draws once more for the leftover part of a pass, which is empty here. A user's generator advances by it.
    if sampler.generator is not None:
        torch.randperm(length, generator=generator)


def _distributed(sampler: DistributedSampler[Any], num_indices: int) -> Iterator[int]:
    length, ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]  # torch asks for it, too
    part = EpochPart(length=length, rank=sampler.rank, num_replicas=ranks, drop_last=sampler.drop_last)
    if (sampler.num_samples, sampler.total_size) != (part.num_own, part.num_own * ranks):
        return islice(iter(sampler), num_indices, None)  # other code has changed it, or its data set
    seed = int(sampler.seed + sampler.epoch)
    order = order_of("torch", length=length, seed=seed, epoch=0, shuffle=sampler.shuffle)
    return indices_of(order, part, skip=num_indices)


_SKIPS: dict[type, Callable[[Any, int], Iterator[Any]]] = {
    DistributedSampler: _distributed,
    RandomSampler: _random,
    SequentialSampler: lambda sampler, num_indices: iter(range(num_indices, len(sampler.data_source))),
}
