"""The states that the order of a loader's sampler follows from: how they are read, and how they are restored.

They are the random states, the epochs of samplers with ``set_epoch``, and the loader's own objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_faulttolerant.loader.draws import draws_only_at_its_start, generators_of
from lightning_faulttolerant.loader.exactness import Exactness, lacks_generators
from lightning_faulttolerant.loader.index_record import RandomStates
from lightning_faulttolerant.loader.objects import LoaderObjects, of_workers_in
from lightning_faulttolerant.loader.samplers import epochs_of, is_interruptible, put_epochs
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import rng_state, set_rng_state, torch_rng_state


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
        sampler: Iterable[Any],
        *,
        held: HeldGenerators,
        exactness: Exactness,
        is_endless: bool,
        objects: LoaderObjects | None,
    ) -> None:
        self._sampler = sampler
        self._held = held
        self._exactness = exactness
        self._is_endless = is_endless
        self._objects = objects
        self.may_draw = not is_endless and not draws_only_at_its_start(sampler)
        """Whether the sampler may draw random numbers in the middle of an iteration."""

    def now(self) -> RandomStates:
        """Return the current random states."""
        return RandomStates(rng=rng_state(), held=self._held.state_dict(), sampler_epochs=self._epochs())

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
        held = self._held.state_dict(of=generators_of(self._sampler))
        return RandomStates(rng=torch_rng_state(), held=held, sampler_epochs=self._epochs(), objects=objects)

    def at_birth(self, start: RandomStates, *, is_resumed: bool) -> RandomStates:
        """Return the current states, with the changes on the objects that workers copy.

        Args:
            start: The moment when the sampler starts.
            is_resumed: Whether the iteration is resumed: `start` then has no objects.
        """
        objects: Mapping[str, Any] = {}
        if self._objects is not None:
            knows = not is_resumed and not self._is_endless
            objects = of_workers_in(start.objects) if knows else self._objects.of_workers()
        return replace(self.now(), objects=objects)

    def restore(self, moment: RandomStates) -> list[str]:
        """Restore the random states of `moment`; return the paths of generators that are missing."""
        set_rng_state(moment.rng)
        missing = self._held.load_state_dict(moment.held) if moment.held else []
        put_epochs(self._samplers_with_epoch(), moment.sampler_epochs)
        return missing

    def go_back_to(self, moment: RandomStates) -> None:
        """Restore all the states of a process that is gone."""
        missing = self.restore(moment)
        if self._objects is not None:
            missing += self._objects.load(moment.objects)
        if missing:
            self._exactness.refuse(f"The order of samples begins again: {lacks_generators(missing)}")

    def own_progress(self) -> list[Any]:
        """Return the positions that this package's samplers keep: the user may advance them."""
        return [s.progress_state() if is_interruptible(s) else None for s in self._samplers_with_epoch()]

    def load_own_progress(self, states: Sequence[object]) -> None:
        """Set this package's samplers to the positions that `own_progress` returned."""
        put_epochs(self._samplers_with_epoch(), states)

    def _epochs(self) -> list[Any]:
        return epochs_of(self._samplers_with_epoch())

    def _samplers_with_epoch(self) -> list[Any]:
        chain = (self._sampler, getattr(self._sampler, "sampler", None))
        return [s for s in chain if callable(getattr(s, "set_epoch", None))]
