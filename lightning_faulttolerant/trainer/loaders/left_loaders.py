"""Training loaders that have no place in a checkpoint, because they can't be followed.

They run as they are. A resume skips the batches that were consumed. The epoch then has as many steps as in an
uninterrupted run, and validation comes at the same time.

New workers call the function that Lightning gives them if the user passed none.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import Exactness

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def place_or_none(place: str, state_of: Callable[[], _T], exactness: Exactness) -> _T | None:
    """Return the result of `state_of`, or ``None`` if a loader can't report its place and `exactness` isn't strict.

    Raises:
        NotExactError: If it is strict.
    """
    try:
        return state_of()
    except NotExactError as error:
        if exactness.strict:
            raise
        exactness.admit(f"Loader {place} has no position to resume from: {error}")
        return None


def skip_consumed(
    iterators: Sequence[Iterator[object]],
    loaders: Sequence[object],
    state: Mapping[str, Any],
    *,
    stage: str,
    num_ahead: int,
) -> None:
    """Draw and drop the consumed batches of each loader whose place was left out.

    Args:
        iterators: Fresh iterators of the training loaders.
        loaders: The training loaders.
        state: The result of `Loaders.state_dict`.
        stage: The prefix of these loaders' places.
        num_ahead: How many of the fetched batches were not consumed.
    """
    combined = state.get("combined")
    for number, (iterator, loader) in enumerate(zip(iterators, loaders, strict=False)):
        place = f"{stage}/{number}"
        if combined is None or place not in state.get("left", ()) or state.get("own", {}).get(place):
            continue
        if all(hasattr(loader, name) for name in ("state_dict", "load_state_dict")):
            continue  # Lightning restores the state that it has saved for it
        num_skipped = _num_in_cycle(combined["index"] - num_ahead, loader)
        if num_skipped > 0:
            _log.warning("%s: the first %d batches of the epoch are drawn and dropped.", place, num_skipped)
            deque(islice(iterator, num_skipped), maxlen=0)


def _num_in_cycle(num_batches: int, loader: Any) -> int:
    """Return how many of the batches came from the current pass over `loader`: a short loader is cycled."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return num_batches
    return num_batches if num_batches <= length or not length else (num_batches - 1) % length + 1


def default_worker_init(trainer: Trainer) -> Callable[[int], None] | None:
    """Return the ``worker_init_fn`` that Lightning sets under ``seed_everything(workers=True)``, else ``None``.

    Lightning sets it after ``process_dataloader``, and only if the loader has none. Our loader has one by then.
    """
    if not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return None
    return partial(pl_worker_init_function, rank=trainer.global_rank)
