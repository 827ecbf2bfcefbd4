"""How often something may be done so that it takes at most a given share of the time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """Allows an action again when so much time has passed that its last cost is a small enough share.

    Args:
        share: Of the whole time, in (0, 1]; 1 means no limit.
        clock: Gives seconds.
    """

    def __init__(self, share: float, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._share = share
        self._clock = clock
        self.next_at = float("-inf")
        """From when on the action is allowed again."""

    def allows(self) -> bool:
        """Return whether the action may be done now."""
        return self._clock() >= self.next_at

    def spend(self, began: float) -> float:
        """Note that the action was done from `began` until now; return its cost in seconds."""
        now = self._clock()
        cost = now - began
        self.next_at = now + cost * (1 - self._share) / self._share
        return cost

    def now(self) -> float:
        """Return the clock's time, for `spend`."""
        return self._clock()
