"""An `IndexSide` that begins, and one that continues."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.index_record import plan_from_state
from lightning_faulttolerant.loader.index_side import IndexSide
from lightning_faulttolerant.state.generators import HeldGenerators


def make(sampler: Any, *, window: int = 2, exactness: Exactness | None = None) -> IndexSide:
    """Return the stand-in for `sampler`."""
    held = HeldGenerators({"sampler": sampler})
    return IndexSide(sampler, held=held, exactness=exactness or Exactness(), window=window)


def begin(sampler: Any, **arguments: Any) -> tuple[IndexSide, Iterator[Any]]:
    """Begin a fresh iteration, as in a loader without workers."""
    side = make(sampler, **arguments)
    side.begin(None, new_workers=True)
    return side, iter(side)


def resume(
    sampler: Any, state: Any, position: int, *, exactness: Exactness | None = None
) -> tuple[IndexSide, Iterator[Any]]:
    """Continue at `position` of a state."""
    side = make(sampler, exactness=exactness)
    side.begin(plan_from_state(state, position), new_workers=True)
    iterator = iter(side)
    side.ensure_open()
    return side, iterator
