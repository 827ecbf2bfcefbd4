"""The epoch that a loop tells its loader's samplers by ``set_epoch``, continued with where a new process counts from 0.

A loop of the user's own usually tells the right epoch after a resume. Fabric counts the iterations of its process, so
that its first one would be epoch 0 again, with the order of epoch 0.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any


class ToldEpochs:
    """What the samplers of one loader are told.

    Args:
        samplers: All that may have ``set_epoch``.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        found = {id(s): s for s in samplers if callable(getattr(s, "set_epoch", None)) and hasattr(s, "__dict__")}
        self._samplers = list(found.values())
        self._told: list[_Told] = []

    @property
    def is_listening(self) -> bool:
        """Whether it stands between the samplers and who tells them."""
        return bool(self._told)

    def state_dict(self) -> list[int | None]:
        """Return the epoch of each sampler."""
        return [getattr(sampler, "epoch", None) for sampler in self._samplers]

    def listen(self) -> None:
        """Note from here on what the samplers are told."""
        self.leave()
        self._told = [_Told(sampler) for sampler in self._samplers]
        for told, sampler in zip(self._told, self._samplers, strict=True):
            vars(sampler)["set_epoch"] = told

    def leave(self) -> None:
        """Let the samplers be as they were."""
        for sampler in self._samplers:
            vars(sampler).pop("set_epoch", None)
        self._told = []

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Let the code that handles states set the samplers' epochs as they are."""
        for told in self._told:
            told.is_heard = False
        try:
            yield
        finally:
            for told in self._told:
                told.is_heard = True

    def go_on(self, epochs: Sequence[int | None], begun: Sequence[int | None], *, begins_next: bool) -> None:
        """Bring the samplers to their epochs, now that an iteration begins.

        Args:
            epochs: What `state_dict` gave.
            begun: What it gave when the last iteration had begun: a sampler may move on by itself after its end.
            begins_next: Whether the iteration is the one after that, rather than its rest.
        """
        goes_on = False
        for told, epoch, of_last in zip(self._told, epochs, begun, strict=False):
            if epoch is not None and of_last is not None:
                told.go_on(epoch, expected=of_last + begins_next)
                goes_on = goes_on or told.offset > 0
        if not goes_on:
            self.leave()


class _Told:
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
        # A sampler that is pickled or copied is told its epochs itself.
        return getattr, (self._sampler(), "set_epoch")

    def go_on(self, epoch: int, *, expected: int) -> None:
        """Set the epoch that `expected` says if the last one told is before it; what nobody tells stays at `epoch`."""
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
