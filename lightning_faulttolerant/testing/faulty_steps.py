"""Number the steps, and apply a fault to chosen ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, final

from lightning_faulttolerant.testing.faults import Fault
from lightning_faulttolerant.testing.steps import KINDS, Step

_inside = threading.local()


@final
class FaultySteps:
    """The steps of one block.

    Args:
        fault: Applied in the chosen steps; None only counts.
        kind: Only steps of this kind, or of these kinds, are chosen; all by default.
        at: The number of the chosen step among those of its kind, from 1; None for each of them.
        lasting: Whether each step of its kind from `at` on is chosen.
    """

    def __init__(
        self, fault: Fault | None, *, kind: str | Collection[str] | None, at: int | None, lasting: bool
    ) -> None:
        kinds = frozenset(KINDS if kind is None else [kind] if isinstance(kind, str) else kind)
        if not kinds <= set(KINDS):
            raise ValueError(f"There is no kind of step named {sorted(kinds - set(KINDS))}. Take some of {KINDS}.")
        if at is not None and at < 1:
            raise ValueError(f"at is {at}, steps are counted from 1.")
        self.steps: list[Step] = []
        self._fault = fault
        self._kinds = kinds
        self._at = at
        self._lasting = lasting
        self._num_of_kinds = 0
        self._lock = threading.RLock()  # a signal handler may take a step too

    def take(self, kind: str, path: Path, perform: Callable[..., Any], *, num_bytes: int = 0) -> Any:
        """Count a step, and do it, or apply the fault to it; steps within a step are not counted."""
        if getattr(_inside, "is_set", False):
            return perform()
        with self._lock:
            step = Step(number=len(self.steps) + 1, kind=kind, path=path, num_bytes=num_bytes)
            self.steps.append(step)
            fault = self._fault if self._is_chosen(kind) else None
        with _steps_within_hidden():
            return perform() if fault is None else fault(step, perform)

    def _is_chosen(self, kind: str) -> bool:
        if kind not in self._kinds:
            return False
        self._num_of_kinds += 1
        return self._at is None or self._num_of_kinds == self._at or (self._lasting and self._num_of_kinds > self._at)


@contextlib.contextmanager
def _steps_within_hidden() -> Iterator[None]:
    _inside.is_set = True
    try:
        yield
    finally:
        _inside.is_set = False
