"""The epoch that a loop passes to its samplers' ``set_epoch``, continued when a new process counts from 0.

A user's loop usually passes the right epoch after a resume. Fabric counts the iterations of its process, so its first
one would be epoch 0 again, with the order of epoch 0.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any


class ToldEpochs:
    """The epochs that are set on the samplers of one loader.

    Args:
        samplers: All samplers that may have ``set_epoch``.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        found = {id(s): s for s in samplers if callable(getattr(s, "set_epoch", None)) and hasattr(s, "__dict__")}
        self._samplers = list(found.values())
        self._told: list[_SetEpoch] = []

    @property
    def is_listening(self) -> bool:
        """Whether it intercepts the samplers' ``set_epoch``."""
        return bool(self._told)

    def state_dict(self) -> list[int | None]:
        """Return the epoch of each sampler."""
        return [getattr(sampler, "epoch", None) for sampler in self._samplers]

    def listen(self) -> None:
        """Record the epochs that are set on the samplers from now on."""
        self.leave()
        self._told = [_SetEpoch(sampler) for sampler in self._samplers]
        for told, sampler in zip(self._told, self._samplers, strict=True):
            vars(sampler)["set_epoch"] = told

    def leave(self) -> None:
        """Restore the samplers' own ``set_epoch``."""
        for sampler in self._samplers:
            vars(sampler).pop("set_epoch", None)
        self._told = []

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Let the code that handles states set the samplers' epochs without correction."""
        for told in self._told:
            told.is_heard = False
        try:
            yield
        finally:
            for told in self._told:
                told.is_heard = True

    def go_on(self, epochs: Sequence[int | None], begun: Sequence[int | None], *, begins_next: bool) -> None:
        """Bring the samplers to their epochs when an iteration begins.

        Args:
            epochs: The epochs that `state_dict` returned.
            begun: The epochs at the start of the last iteration: a sampler may advance on its own after the end.
            begins_next: Whether this iteration is the one after that, and not its rest.
        """
        continues = False
        for told, epoch, of_last in zip(self._told, epochs, begun, strict=False):
            if epoch is not None and of_last is not None:
                told.go_on(epoch, expected=of_last + begins_next)
                continues = continues or told.offset > 0
        if not continues:
            self.leave()


class _SetEpoch:
    """Stands in for a sampler's ``set_epoch``."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = weakref.ref(sampler)
        self._last: int | None = None
        self.offset = 0
        self.is_heard = True

    def __call__(self, epoch: int) -> None:
        if self.is_heard:
            self._last = epoch
            epoch += self.offset
        self._set(epoch)

    def __reduce__(self) -> tuple[Any, ...]:
        # A pickled or copied sampler has its own ``set_epoch`` again.
        return getattr, (self._sampler(), "set_epoch")

    def go_on(self, epoch: int, *, expected: int) -> None:
        """Set the epoch to `expected` if the last one set is smaller. If none was set, set `epoch`."""
        if self._last is None:
            if getattr(self._sampler(), "epoch", None) != epoch:
                self._set(epoch)
        elif self._last < expected:
            self.offset = expected - self._last
            self._set(expected)

    def _set(self, epoch: int) -> None:
        sampler = self._sampler()
        if sampler is not None:
            type(sampler).set_epoch(sampler, epoch)
