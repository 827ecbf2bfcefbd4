"""The trackers that follow loaders, by the kind of loader.

`PrefetchState` is where the training loaders were when a batch was fetched ahead of its use. `ResumedPlaces` is where
the loaders of a resumed fit continue.

Training loaders that can't be followed have no place in a checkpoint. They run as they are. A resume skips the batches
that were consumed. The epoch then has as many steps as in an uninterrupted run, and validation comes at the same time.
New workers call the function that Lightning gives them if the user passed none.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import TRACKER, Exactness, OwnState
from lightning_faulttolerant.loader.index_side import IndexSide
from lightning_faulttolerant.loader.iteration import IterationOwner
from lightning_faulttolerant.loader.other_loaders import (
    OwnLoader,
    ReplayedLoader,
    keeps_own_state,
    user_loader_of,
    why_not_replayed,
    why_state_is_no_use,
)
from lightning_faulttolerant.loader.tracked import TrackedLoader

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def place_or_none(place: str, state_of: Callable[[], _T], exactness: Exactness, *, strict: bool) -> _T | None:
    """Return the result of `state_of`, or ``None`` if a loader can't report its place and that is no error.

    Raises:
        NotExactError: If `strict`.
    """
    try:
        return state_of()
    except NotExactError as error:
        if strict:
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
            _log.warning("%s has no saved position: its first %d batches are loaded and dropped.", place, num_skipped)
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


OfWholeLoader = OwnLoader | ReplayedLoader
"""Follows what the loader yields, rather than the parts that it consists of."""
Tracker = TrackedLoader | OfWholeLoader


def why_not_whole(loader: object) -> str | None:
    """Return why a loader can't be followed as a whole, or ``None`` if it can."""
    return why_state_is_no_use(loader) if keeps_own_state(loader) else why_not_replayed(loader)


def track(
    loader: object, *, exactness: Exactness, owner: IterationOwner, place: str, older: Sequence[OfWholeLoader]
) -> OfWholeLoader:
    """Return the tracker that follows a loader as a whole: by its own state if it has one, or else by a replay."""
    if keeps_own_state(loader):
        return OwnLoader(loader, exactness=exactness, owner=owner, place=place)
    return ReplayedLoader(loader, exactness=exactness, owner=owner, place=place, older=older)


def user_loader(loader: object) -> object:
    """Return the loader that `loader` is our copy of, or `loader` itself."""
    tracker = getattr(loader, "__dict__", {}).get(TRACKER)
    return user_loader_of(loader) if tracker is None else tracker.user_loader


def followed_loaders(trackers: Mapping[str, Tracker]) -> dict[str, object]:
    """Return the copies of loaders that the trainer uses, by place."""
    followed = {place: one for place, one in trackers.items() if isinstance(one, TrackedLoader) and not one.is_gone}
    return {place: one.loader for place, one in followed.items()}


def must_note_fetches(trackers: Mapping[str, Tracker], stage: str) -> bool:
    """Return whether the fetches of an evaluation must be noted: they wait for workers, or a loader begins in one."""
    found = [tracker for place, tracker in trackers.items() if place.startswith(stage)]
    is_sole = len(found) == 1 and isinstance(found[0], TrackedLoader)
    return not is_sole or bool(found[0].num_workers)


def loader_states(checkpoint: Mapping[str, Any]) -> list[object]:
    """Return a checkpoint's states of loaders with a ``state_dict``. Lightning gives them to every rank."""
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    states: list[object] = fit_loop.get("combined_loader", [])
    return states


class PrefetchState(NamedTuple):
    """Where the training loaders were right before a batch was fetched, with the random states of that instant.

    ``iterations`` holds each tracker's own iteration, and how many batches it had yielded.
    """

    iterations: Mapping[str, tuple[object, int]]
    combined: Mapping[str, object] | None
    rng: Mapping[str, bytes]
    held: Mapping[str, Mapping[str, bytes]]
    own: Mapping[str, object]


class PrefetchStates:
    """The last of these states: that of the batch to train next."""

    def __init__(self) -> None:
        self.last: PrefetchState | None = None
        self.is_in_fetch = False
        """Whether the fetch in progress has its state already."""
        self.is_on = False
        """Whether each training batch is fetched before the previous one is trained."""

    def note(self, state: PrefetchState) -> None:
        """Note the state before the fetch that begins now."""
        self.is_in_fetch = True
        self.last = state


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumedPlaces:
    """Where the loaders of a fit continue.

    Args:
        states: The states of trackers, by place.
        own: The states of the users' own objects, by place.
        left: The training loaders without a place.
    """

    states: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, object] = field(default_factory=dict)
    left: Sequence[str] = ()

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> ResumedPlaces:
        """Return the places in a state of `Loaders.state_dict`."""
        return cls(states=state.get("places", {}), own=state.get("own", {}), left=state.get("left", ()))


@dataclass(kw_only=True, slots=True)
class Continued:
    """What the loaders of a fit continue from.

    Args:
        resumed: Where they continue.
        has_places: Whether the checkpoint has the loaders' places.
        lightning_restores: Whether it is not of this package, and Lightning restores the loaders' own states.
        check: Called with the place and the fingerprint of each loader.
    """

    resumed: ResumedPlaces = field(default_factory=ResumedPlaces)
    has_places: bool = False
    lightning_restores: bool = False
    check: Callable[[str, dict[str, object]], None] = lambda place, fingerprint: None


@dataclass(kw_only=True, slots=True)
class KnownLoaders:
    """What is known of the loaders that Lightning has processed, by their places.

    Args:
        trackers: Those of the loaders that are followed.
        index_sides: Those of the training loaders.
        fingerprints: The fingerprints of the loaders that have one.
        untracked: Loaders that run as they are. The state still includes what their objects hold.
        own: The states that the users' own objects keep.
        whole: The trackers that follow a loader as a whole; also those that were replaced.
        combined: The CombinedLoaders that hold our copies.
    """

    trackers: dict[str, Tracker] = field(default_factory=dict)
    index_sides: dict[str, IndexSide] = field(default_factory=dict)
    fingerprints: dict[str, object] = field(default_factory=dict)
    untracked: dict[str, object] = field(default_factory=dict)
    own: dict[str, OwnState] = field(default_factory=dict)
    whole: list[OfWholeLoader] = field(default_factory=list)
    combined: weakref.WeakSet[object] = field(default_factory=weakref.WeakSet)

    def clear(self) -> None:
        """Forget the loaders. Their fingerprints stay."""
        for known in (self.trackers, self.index_sides, self.untracked, self.own):
            known.clear()
        self.whole.clear()
        self.combined.clear()


class TrainersIterations:
    """Which iterations over the loaders are the trainer's own. All others are a callback's."""

    def __init__(self) -> None:
        self.is_now = False
        """Whether an iteration that begins now is the trainer's own."""
        self.is_held_back = False
        """Whether new training iterations are empty, because they are to begin again in the right place."""

    def owner(self) -> IterationOwner:
        """Return what says which iterations over a loader of an evaluation are the trainer's."""
        return IterationOwner(is_followed=lambda: self.is_now)

    def training_owner(self, before_first_batch: Callable[[], None]) -> IterationOwner:
        """Return what says which iterations over a training loader are the trainer's.

        Args:
            before_first_batch: Called before the first batch of such an iteration is fetched.
        """
        return IterationOwner(
            is_followed=lambda: self.is_now,
            is_held_back=lambda: self.is_held_back,
            before_first_batch=before_first_batch,
        )
