"""Training loaders of which a checkpoint holds no place, because they can't be followed.

They run as they are. On a resume the batches that were consumed are skipped, so that the epoch has as many steps as it
would have had, and validation comes when it would have come.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import refuse

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def place_or_none(place: str, state_of: Callable[[], _T], *, strict: bool, not_exact: list[str]) -> _T | None:
    """Return what `state_of` does, or ``None`` where a loader can't say where it is, and nobody is strict.

    Raises:
        NotExactError: If `strict`.
    """
    try:
        return state_of()
    except NotExactError as error:
        if strict:
            raise
        refuse(f"Loader {place} has no place to resume at: {error}", strict=False, not_exact=not_exact)
        return None


def skip_consumed(
    iterators: Sequence[Iterator[Any]], loaders: Sequence[Any], state: Mapping[str, Any], *, stage: str, num_ahead: int
) -> None:
    """Draw and drop the consumed batches of each loader whose place was left out.

    Args:
        iterators: Of the training loaders, fresh.
        loaders: These.
        state: What `Loaders.state_dict` gave.
        stage: What the places of these loaders begin with.
        num_ahead: How many of the batches that had come out were not consumed.
    """
    combined = state.get("combined")
    for number, (iterator, loader) in enumerate(zip(iterators, loaders, strict=False)):
        place = f"{stage}/{number}"
        if combined is None or place not in state.get("left", ()) or state.get("own", {}).get(place):
            continue
        if all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")):
            continue  # Lightning gives it the state that it has saved
        num_skipped = _num_in_cycle(combined["index"] - num_ahead, loader)
        if num_skipped > 0:
            _log.warning("%s: the first %d batches of the epoch are drawn and dropped.", place, num_skipped)
            deque(islice(iterator, num_skipped), maxlen=0)


def _num_in_cycle(num_batches: int, loader: Any) -> int:
    """Return how many of the batches came out of the run over `loader` that is under way: a short one is cycled."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return num_batches
    return num_batches if num_batches <= length or not length else (num_batches - 1) % length + 1
