"""Loaders that are followed by their batches: a loader that keeps its own state, and any iterable, by a replay.

The state of a loader is taken right before each fetch. To resume, the state from before the last consumed batch is
restored and that batch is drawn again. It must be the same batch: a state that lacks something is detected, not
trusted.

`WholeLoader` is the base of all loaders that are followed by their batches, not by their parts.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.loader.exactness import (
    REPLAYED,
    Exactness,
    class_of,
    is_resumable,
    keeps_own_position,
    swap,
    why_not_drawn_again,
)
from lightning_faulttolerant.loader.index_record import RandomStates
from lightning_faulttolerant.loader.iteration import IterationOwner
from lightning_faulttolerant.loader.objects import torch_loaders_in
from lightning_faulttolerant.loader.replayer import ReplayedIteration, Replayer
from lightning_faulttolerant.loader.samplers import has_state_methods, state_of, what_is_not_plain
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.rng import rng_state, set_rng_state


class WholeLoader:
    """Ensures that only the trainer's iterations are followed.

    Args:
        loader: The user's loader.
        owner: Says which iterations are followed.
        place: Which of the trainer's loaders it is.
    """

    num_workers = 0
    num_handed_out = 0
    is_gone = False

    def __init__(self, loader: Any, *, owner: IterationOwner, place: str) -> None:
        self.loader = loader
        self.owner = owner
        self.place = place
        self.followed = loader
        """The object that the trainer iterates over."""

    def give_to(self, owner: IterationOwner) -> None:
        """Let `owner` say from now on which iterations are followed."""
        self.owner = owner

    def iterate(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Create the user's iterator for a new iteration, at the position that `load_state_dict` set."""
        if not self.owner.is_followed():
            return make_iterator()
        if self.owner.is_held_back():
            return iter(())
        return _AnnouncedBatches(self._begun(make_iterator), self.owner.before_first_batch)

    def _begun(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        """Begin an iteration that is followed, or continue the one that was resumed."""
        raise NotImplementedError

    def close_workers(self) -> None:
        """Do nothing: the user's loader manages its own workers."""

    def release_workers(self) -> None:
        """Do nothing, for the same reason."""


class _AnnouncedBatches(Iterator[object]):
    """Calls a function right before the first batch is requested."""

    def __init__(self, batches: Iterator[object], before_first: Callable[[], None]) -> None:
        self._batches = batches
        self._before_first: Callable[[], None] | None = before_first

    def __next__(self) -> Any:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        return next(self._batches)


_KEPT_FETCHES = 4  # of the batches fetched, at most the last one is not trained yet


def keeps_own_state(loader: object) -> bool:
    """Return whether `loader` is a user's object that reports its own position in this process."""
    if isinstance(loader, DataLoader) and (keeps_own_position(loader) or is_resumable(loader) or loader.num_workers):
        return False
    return has_state_methods(loader)


def why_state_is_no_use(loader: Any) -> str | None:
    """Return why the state that `loader` keeps can't be used, or ``None`` if it can."""
    strange = what_is_not_plain(loader.state_dict())
    if strange is not None:
        return f"its state_dict has {strange}, but checkpoints hold only plain values and tensors"
    user_class = type(loader)
    try:
        swap(loader, class_of(user_class, lambda make_iterator: make_iterator()))
    except TypeError:
        return f"the class {user_class.__name__} can't be subclassed, so it can't be followed"
    swap(loader, user_class)
    return None


@dataclass(kw_only=True, slots=True)
class Fetch:
    """The instant before a batch was fetched, and a digest of the batch."""

    state: Any
    moment: RandomStates
    digest: int | None = None


@dataclass(kw_only=True, slots=True)
class OwnIteration:
    """One run over the loader: the instant before it began, and the instants before each of its last fetches."""

    start: Fetch
    num_out: int = 0
    fetches: deque[tuple[int, Fetch]] = field(default_factory=lambda: deque(maxlen=_KEPT_FETCHES))


class OwnLoader(WholeLoader):
    """Follows a loader that keeps its own state through its iterations.

    Args:
        loader: The user's loader; `why_state_is_no_use` must be ``None`` for it.
        exactness: Collects what is not exact.
        owner: Says which iterations are followed.
        place: Which of the trainer's loaders it is.
    """

    def __init__(self, loader: Any, *, exactness: Exactness, owner: IterationOwner, place: str) -> None:
        super().__init__(loader, owner=owner, place=place)
        self._user_class = type(loader)
        self._plan: Mapping[str, object] | None = None
        self._exactness = exactness
        self.iteration: OwnIteration | None = None
        self.held = HeldGenerators({"loader": loader})

    def follow(self) -> None:
        """Observe the loader's iterations. Until `leave`, its class is one derived from its own."""
        swap(self.loader, class_of(self._user_class, self.iterate))

    def leave(self) -> None:
        """Restore the loader's own class."""
        swap(self.loader, self._user_class)

    def _begun(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        plan, self._plan = self._plan, None
        if plan is None or plan["start"] is None:
            if plan is not None:
                self.loader.load_state_dict(copy.deepcopy(plan["state"]))
            self.iteration = OwnIteration(start=self._now())
            return _NotedBatches(make_iterator(), self, self.iteration)
        before = self._moment()
        try:
            return self._resumed(plan, make_iterator)
        finally:
            self._restore(before)

    def _resumed(self, plan: Mapping[str, Any], make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        start, last = Fetch(state=plan["start"]["state"], moment=RandomStates(**plan["start"]["moment"])), plan["last"]
        self.loader.load_state_dict(copy.deepcopy((last or plan["start"])["state"]))
        self._restore(start.moment)
        self.iteration = OwnIteration(start=start)
        batches = _NotedBatches(make_iterator(), self, self.iteration)
        if last is not None:
            self.iteration.num_out = plan["consumed"] - 1
            self._restore(RandomStates(**last["moment"]))
            if batches.draw_again() != last["digest"]:
                self._differs(plan["consumed"])
        return batches

    def _differs(self, num_batches: int) -> None:
        message = (
            f"Restored with its own load_state_dict, the loader {type(self.loader).__name__} yields another batch "
            f"{num_batches - 1} than before. Its state_dict lacks something, such as its order or what it has fetched "
            "ahead, or its data changed. Its batches would differ from the uninterrupted run. Let its state hold "
            "everything that the next batch depends on, or pass strict=False."
        )
        self._exactness.refuse(message)

    def note_fetch(self, iteration: OwnIteration) -> Fetch:
        """Note the instant before a batch is fetched."""
        fetch = self._now()
        iteration.fetches.append((iteration.num_out, fetch))
        return fetch

    def state_dict(self, consumed: int | None, iteration: OwnIteration | None = None) -> dict[str, object]:
        """Return the position.

        Args:
            consumed: The number of consumed batches of the iteration; ``None`` between iterations.
            iteration: The iteration; the current one by default.

        Raises:
            NotExactError: If the loader's state at that position is no longer known.
        """
        if self._plan is not None:  # resumed, and not iterated since: the position is unchanged
            return copy.deepcopy(dict(self._plan))
        iteration = iteration or self.iteration
        if iteration is None or consumed is None:
            return {"consumed": None, "state": state_of(self.loader), "start": None, "last": None}
        last = dict(iteration.fetches).get(consumed - 1)
        if last is None and consumed:
            raise NotExactError(
                f"The position of the loader {type(self.loader).__name__} after {consumed} batches is no longer "
                f"known, because {iteration.num_out} have been fetched by now. Its batches could not continue exactly."
            )
        return {
            "consumed": consumed,
            "state": None,
            "start": _fetch_state(iteration.start),
            "last": last and _fetch_state(last),
        }

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Let the next iteration continue from a position of `state_dict`."""
        self._plan = copy.deepcopy(dict(state_dict))

    def replayed(self) -> list[object]:
        """Return an empty list: the loader's state carries everything."""
        return []

    def _now(self) -> Fetch:
        return Fetch(state=state_of(self.loader), moment=self._moment())

    def _moment(self) -> RandomStates:
        self.held.refresh()
        return RandomStates(rng=rng_state(), held=self.held.state_dict(), sampler_epochs=[])

    def _restore(self, moment: RandomStates) -> None:
        set_rng_state(moment.rng)
        self.held.load_state_dict(moment.held)


class _NotedBatches(Iterator[object]):
    """Passes on the batches of the user's iterator, and notes each fetch."""

    def __init__(self, batches: Iterator[object], tracker: OwnLoader, iteration: OwnIteration) -> None:
        self._batches = batches
        self._tracker = tracker
        self._iteration = iteration

    def draw_again(self) -> int | None:
        """Draw the batch that was consumed last again; return its digest."""
        try:
            return sample_digest(next(self))
        except StopIteration:
            return None

    def __next__(self) -> Any:
        fetch = self._tracker.note_fetch(self._iteration)
        batch = next(self._batches)
        fetch.digest = sample_digest(batch)
        self._iteration.num_out += 1
        return batch


def _fetch_state(fetch: Fetch) -> dict[str, object]:
    return {"state": fetch.state, "moment": fetch.moment.state_dict(), "digest": fetch.digest}


def is_replayed(loader: object) -> bool:
    """Return whether `loader` is followed by its batches: it is not torch's, or its class does more with them."""
    if not isinstance(loader, DataLoader):
        return True
    return not (is_resumable(loader) or keeps_own_position(loader) or type(loader).__iter__ is DataLoader.__iter__)


def why_not_replayed(loader: object) -> str | None:
    """Return why `loader` can't be drawn from again, or ``None`` if it can, as far as that is known in advance."""
    for name, inner in torch_loaders_in(loader).items():
        reason = why_not_drawn_again(inner)
        if reason is not None:
            return reason if inner is loader else f"it takes its batches from {name}, and {reason}"
    return None


class ReplayedLoader(WholeLoader):
    """Follows any iterable through its iterations.

    Args:
        loader: The user's loader.
        exactness: Collects what is not exact.
        owner: Says which iterations are followed.
        place: Which of the trainer's loaders it is.
        older: The objects that follow the fit's other loaders, created before.
    """

    def __init__(
        self,
        loader: Any,
        *,
        exactness: Exactness,
        owner: IterationOwner,
        place: str,
        older: Iterable[WholeLoader] = (),
    ) -> None:
        super().__init__(loader, owner=owner, place=place)
        kind: Any = type(loader)
        self._user_class = kind.__base__ if hasattr(kind, REPLAYED) else kind
        self._is_swapped = False
        others = [one.replayer for one in older if isinstance(one, ReplayedLoader)]
        name = f"loader {place} ({self._user_class.__name__})"
        self.replayer: Replayer = Replayer(loader, name=name, exactness=exactness, older=others)

    @property
    def iteration(self) -> ReplayedIteration | None:
        """The latest iteration."""
        return self.replayer.iteration

    @property
    def held(self) -> HeldGenerators:
        """The generators that the loader holds."""
        return self.replayer.held

    def follow(self) -> None:
        """Observe the loader's iterations. Until `leave`, its class is one derived from its own.

        If its class doesn't allow that, or it is already followed in another place, `followed` stands in for it.
        """
        is_plain = isinstance(self.loader, torch.Tensor) or not hasattr(self._user_class, "__iter__")
        if not (is_plain or hasattr(type(self.loader), REPLAYED)):
            try:
                swap(self.loader, class_of(self._user_class, self.iterate, **{REPLAYED: True}))
            except TypeError:  # one of Python's classes, or a class that can't be derived from
                pass
            else:
                self._is_swapped = True
                return
        kind = _SizedStandIn if hasattr(self._user_class, "__len__") else _StandIn
        self.followed = kind(self.loader, self.iterate, self._make_iterator)

    def leave(self) -> None:
        """Restore the loader's own class."""
        if self._is_swapped:
            swap(self.loader, self._user_class)
            self._is_swapped = False

    def _make_iterator(self) -> Iterator[object]:
        own = getattr(self._user_class, "__iter__", None)
        made: Iterator[object] = iter(self.loader) if own is None else own(self.loader)
        return made

    def _begun(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        return self.replayer.iterate(make_iterator)

    def state_dict(self, consumed: int | None, iteration: ReplayedIteration | None = None) -> dict[str, object]:
        """Return the position, as `Replayer.state_dict` does."""
        return self.replayer.state_dict(consumed, iteration)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Bring the loader to a position of `state_dict`."""
        self.replayer.load_state_dict(state_dict, self._make_iterator)

    def replayed(self) -> list[object]:
        """Return the loader, and the iterators and similar objects in it, which a replay creates again."""
        return [self.loader, *self.replayer.live()]


class _StandIn:
    """Stands in for a loader whose class can't be derived from, such as a generator."""

    def __init__(
        self,
        loader: Any,
        iterate: Callable[[Callable[[], Iterator[object]]], Iterator[object]],
        make_iterator: Callable[[], Iterator[object]],
    ) -> None:
        self.user_loader = loader
        self._iterate = iterate
        self._make_iterator = make_iterator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def __iter__(self) -> Iterator[object]:
        return self._iterate(self._make_iterator)


class _SizedStandIn(_StandIn):
    def __len__(self) -> int:
        return len(self.user_loader)


def user_loader_of(loader: Any) -> Any:
    """Return the loader that `loader` stands in for, or `loader` itself."""
    return loader.user_loader if isinstance(loader, _StandIn) else loader
