"""The state of a sampler: how much of an epoch was consumed, and which order the position belongs to.

A state is checked completely before anything is assigned. The count is the number that the loop reports as consumed,
not the number that a loader with workers has fetched ahead. The end of an epoch is the beginning of the next one: a
state saved there never resumes into an empty epoch.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal

from lightning_faulttolerant.errors import AdvancedTooFarError, FingerprintMismatchError, HasNotResetProgressError
from lightning_faulttolerant.samplers.order import EpochPart, RankPlace, check_order, checked_seed, place_of

_log = logging.getLogger(__name__)

VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerPosition:
    """The position of a state.

    Args:
        epoch: The epoch, from 0.
        consumed: The units of the epoch that all ranks had consumed. In the original's state it is the `progress`,
            which counts the units of one rank.
        num_replicas: The number of ranks; 0 if the state doesn't have it, because it is one of the original library.
    """

    epoch: int
    consumed: int
    num_replicas: int

    @property
    def is_original(self) -> bool:
        """Whether it is a state of the original library, ``{"progress", "epoch"}``."""
        return self.num_replicas == 0


def read_position(state: Mapping[str, object], *, kind: str) -> SamplerPosition:
    """Return the position of `state`.

    Args:
        state: A state of a `state_dict`.
        kind: The kind of the sampler that loads it.

    Raises:
        ValueError: If it is not a state of a sampler, or one of another kind or of a later version.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"This is not a state of a sampler: it is {state!r}.")
    if "version" not in state:
        return SamplerPosition(epoch=_count(state, "epoch"), consumed=_count(state, "progress"), num_replicas=0)
    if state["version"] != VERSION:
        raise ValueError(
            f"The state has version {state['version']!r}, but this package reads version {VERSION} and that of "
            "cycling_utils. Update lightning_faulttolerant."
        )
    if state.get("kind") != kind:
        raise ValueError(
            f"The state belongs to a sampler of kind {state.get('kind')!r}, but this one is {kind!r}. They count "
            "different things, so the position would be wrong. Use the kind of sampler with which the run began."
        )
    return SamplerPosition(
        epoch=_count(state, "epoch"),
        consumed=_count(state, "global_consumed"),
        num_replicas=_count(state, "num_replicas", least=1),
    )


def _count(state: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    try:
        number = operator.index(state[key])
    except (KeyError, TypeError) as error:
        raise ValueError(f"This is not a state of a sampler: {key} is {state.get(key, 'missing')!r}.") from error
    if number < least:
        raise ValueError(f"This is not a state of a sampler: {key} is {number}, but must be at least {least}.")
    return number


def check_same(state: Mapping[str, object], now: Mapping[str, object], *, strict: bool) -> None:
    """Check that everything that determines the order is as it was saved.

    Args:
        state: The saved state.
        now: The keys that must be equal, with this sampler's values.
        strict: Whether a difference is an error. Otherwise it is logged, and this sampler's values apply.

    Raises:
        FingerprintMismatchError: If something differs, and `strict`.
    """
    others = [
        f"{key} was {state.get(key)!r} and is now {value!r}" for key, value in now.items() if state.get(key) != value
    ]
    if not others:
        return
    message = (
        f"The sampler is not the one whose state was saved: {'; '.join(others)}. The rest of the epoch would have "
        "another order: some samples would be lost and others repeated. Use the same arguments as before, or pass "
        "strict=False, which keeps only the position."
    )
    if strict:
        raise FingerprintMismatchError(message)
    _log.warning(message)


def check_not_too_far(consumed: int, most: int, unit: str) -> None:
    """Raise unless a position is within the epoch.

    Raises:
        AdvancedTooFarError: If more units were consumed than exist.
    """
    if consumed > most:
        raise AdvancedTooFarError(
            f"The state says that {consumed} {unit} were consumed, but the epoch has {most}. It was saved with other"
            " data or a different number of ranks. Nothing was loaded."
        )


class Interruptible(ABC):
    """The base of the interruptible samplers: an epoch, and the consumed part of it.

    Args:
        dataset: The data set, or its length.
        unit: The unit of the count, in the plural: samples or batches.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders.
        order: The name of an order.
        num_replicas: The number of ranks; ``None``: read when it is needed.
        rank: The rank of this process; ``None``: read when it is needed.
        drop_last: Whether the last units, too few to give each rank one, are left out.
        len_mode: The value of ``len`` after a resume: the length of the whole epoch, or the remaining one.
    """

    kind: str
    _kept: tuple[str, ...] = ("epoch", "_begin", "_own", "_is_restored", "_largest_advance", "_is_exhausted")

    def __init__(
        self,
        dataset: Sized | int,
        *,
        unit: str,
        shuffle: bool,
        seed: int,
        order: str,
        num_replicas: int | None,
        rank: int | None,
        drop_last: bool,
        len_mode: str,
    ) -> None:
        check_order(order)
        if num_replicas is not None and rank is not None:
            RankPlace(rank=rank, num_replicas=num_replicas)
        if len_mode not in ("full", "remaining"):
            raise ValueError(f"len_mode={len_mode!r}: it must be 'full' or 'remaining'.")
        self.dataset: Sized = range(dataset) if isinstance(dataset, int) else dataset
        self.shuffle, self.seed, self.order_name = shuffle, checked_seed(seed, order=order), order
        self.epoch = 0
        self.drop_last = drop_last
        self.len_mode = len_mode
        self._unit = unit
        self._given_replicas, self._given_rank = num_replicas, rank
        self._restart(0)

    def _restart(self, epoch: int, *, begin: int = 0, is_restored: bool = False) -> None:
        self.epoch = epoch
        self._begin = begin  # consumed by all ranks before the current ones began
        self._own = 0  # consumed by this rank since
        self._is_restored = is_restored
        self._is_end_restored = False
        self._place: RankPlace | None = None
        self._largest_advance: int | None = None
        self._is_exhausted = False

    @abstractmethod
    def _length(self) -> int:
        """Return the number of units in the epoch for all ranks together."""

    @abstractmethod
    def _iterate(self, skip: int) -> Iterator[object]:
        """Return the units of this rank's deal after the first `skip`."""

    def place(self) -> RankPlace:
        """Return this rank's place. It stays the same from the first ``advance`` to the end of the epoch."""
        return self._place or place_of(num_replicas=self._given_replicas, rank=self._given_rank)

    @property
    def num_replicas(self) -> int:
        """The number of ranks."""
        return self.place().num_replicas

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.place().rank

    def deal(self, begin: int | None = None) -> EpochPart:
        """Return this rank's part of the epoch.

        Args:
            begin: The count that all ranks had consumed before the deal; by default that of the last resume.
        """
        return self._deal(length=self._length(), begin=self._begin if begin is None else begin)

    def _deal(self, *, length: int, begin: int) -> EpochPart:
        place = self.place()
        return EpochPart(
            length=length,
            begin=begin,
            rank=place.rank,
            num_replicas=place.num_replicas,
            drop_last=self.drop_last,
        )

    def _whole(self) -> int:
        """Return the number of units of a whole epoch for this rank."""
        return self.deal(0).num_own

    @property
    def progress(self) -> int:
        """The number of units that this rank has consumed of its part of the whole epoch."""
        return max(0, self._whole() - self.remaining())

    @property
    def global_consumed(self) -> int:
        """The number that all ranks together have consumed of this epoch, if each has consumed as much as this one."""
        return self.deal().consumed(self._own)

    def remaining(self) -> int:
        """Return the number of units left in this epoch for this rank."""
        return self.deal().num_own - self._own

    def __len__(self) -> int:
        return self.remaining() if self.len_mode == "remaining" else self._whole()

    def __iter__(self) -> Iterator[Any]:
        return self.iter_from(0)

    def iter_from(self, num_skipped: int) -> Iterator[object]:
        """Return an iterator without the first `num_skipped` of ``iter``, in a time independent of their number.

        At the end of an epoch, the next one begins.
        """
        if self.is_over:
            self._restart(self.epoch + 1)
        self._is_exhausted = False
        return self._iterate(self._own + num_skipped)

    def _note_end(self) -> None:
        self._is_exhausted = True

    @property
    def is_over(self) -> bool:
        """Whether this whole epoch was consumed."""
        return self._begin + self._own > 0 and self.remaining() == 0

    def advance(self, n: int) -> None:
        """Count `n` more as consumed by this rank.

        The last call of an epoch may count more than are left, as ``advance(batch_size)`` does for a last batch that is
        not full. The sampler must have yielded everything by then, and `n` must not exceed the one of an earlier call.

        Args:
            n: The number of units, 0 or more.

        Raises:
            AdvancedTooFarError: If fewer are left; nothing is counted then.
            ValueError: If `n` is negative.
        """
        n = operator.index(n)
        if n < 0:
            raise ValueError(f"advance({n}): consumed samples can't be taken back.")
        place = self.place()
        left = self.remaining()
        if n > left and not self._is_short_last(n, left):
            raise AdvancedTooFarError(
                f"advance({n}) at {self.progress} of {self._whole()} {self._unit} of epoch {self.epoch} on rank"
                f" {place.rank}: {left} are left. A position beyond the end can't be resumed. Count each batch once, by"
                " its own length, and begin the next epoch with `with sampler.in_epoch(epoch):`."
            )
        self._place, self._is_restored = place, False
        self._own += min(n, left)
        self._largest_advance = max(n, self._largest_advance or 0)

    def _is_short_last(self, n: int, left: int) -> bool:
        return self._is_exhausted and left > 0 and (self._largest_advance is None or n <= self._largest_advance)

    def reset_progress(self) -> None:
        """Begin this epoch again; or the next one, if the whole epoch was consumed."""
        self._restart(self.epoch + 1 if self.is_over else self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch.

        The current or restored epoch continues at its position. Any other epoch begins.

        Args:
            epoch: The epoch, from 0.

        Raises:
            HasNotResetProgressError: If another epoch is in progress or was restored. Loops that resume begin at
                ``sampler.epoch``.
        """
        is_under_way = self._begin + self._own > 0 and not self.is_over
        if epoch != self.epoch and (is_under_way or self._is_restored):
            raise HasNotResetProgressError(
                f"set_epoch({epoch}), but {self._what_would_be_lost()}. Loop over range(sampler.epoch, num_epochs), "
                "use `with sampler.in_epoch(epoch):`, or discard the rest with sampler.reset_progress()."
            )
        if epoch != self.epoch or self.is_over:
            self._restart(epoch)

    def _what_would_be_lost(self) -> str:
        if self._is_end_restored:
            return f"the end of epoch {self.epoch - 1} was restored: epoch {self.epoch} comes next and would be lost"
        return (
            f"epoch {self.epoch} {('was restored' if self._is_restored else 'is in progress')}, at {self.progress} of "
            f"{self._whole()} {self._unit}: the rest of it would be lost"
        )

    @contextlib.contextmanager
    def in_epoch(self, epoch: int, *, strict: bool = True) -> Iterator[None]:
        """Begin or continue an epoch, and end it after the block: a state saved later begins the next one.

        An exception in the block leaves the position unchanged, so it can still be saved.

        Args:
            epoch: The epoch, from 0.
            strict: Whether another epoch in progress is an error. Otherwise the rest of it is given up, and logged.

        Raises:
            HasNotResetProgressError: If another epoch is in progress, and `strict`.

        Example:
            >>> from lightning_faulttolerant import InterruptibleSampler
            >>> sampler = InterruptibleSampler(range(3), shuffle=False)
            >>> for epoch in range(sampler.epoch, 2):
            ...     with sampler.in_epoch(epoch):
            ...         for index in sampler:
            ...             sampler.advance(1)
            >>> sampler.epoch, sampler.progress
            (2, 0)
        """
        try:
            self.set_epoch(epoch)
        except HasNotResetProgressError as error:
            if strict:
                raise
            _log.warning("The rest of an epoch is discarded. %s", error)
            self._restart(epoch)
        yield
        self._restart(epoch + 1)

    def progress_state(self) -> dict[str, Any]:
        """Return all that is kept of the epoch, as plain values, for the same object recreated with as many ranks."""
        return {name: copy.deepcopy(getattr(self, name)) for name in self._kept}

    def load_progress_state(self, state: Mapping[str, object]) -> None:
        """Restore a state of `progress_state`. Code that keeps positions itself moves a sampler this way."""
        for name in self._kept:
            setattr(self, name, copy.deepcopy(state[name]))

    def _position(self) -> tuple[int, int]:
        """Return the epoch to continue with, and the count that all ranks have consumed of it."""
        return (self.epoch + 1, 0) if self.is_over else (self.epoch, self.global_consumed)

    def _go_to(self, epoch: int, consumed: int) -> None:
        """Set the position to one that was checked."""
        is_over = consumed > 0 and self.deal(consumed).num_own == 0
        self._restart(epoch + 1 if is_over else epoch, begin=0 if is_over else consumed, is_restored=True)
        self._is_end_restored = is_over

    def _order_arguments(self) -> dict[str, object]:
        """Return everything that determines the order."""
        return {
            "dataset_len": len(self.dataset),
            "seed": self.seed,
            "shuffle": self.shuffle,
            "order": self.order_name,
            "drop_last": self.drop_last,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position. The end of an epoch is the beginning of the next one.

        Returns:
            Plain values that belong to the consumed samples, not to those fetched ahead. It is the same on each rank.
        """
        epoch, consumed = self._position()
        return {
            "version": VERSION,
            "kind": self.kind,
            "epoch": epoch,
            "global_consumed": consumed,
            "progress": self.progress if consumed else 0,
            "num_replicas": self.place().num_replicas,
            **self._order_arguments(),
        }

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, object], *, strict: bool = True) -> None:
        """Continue from a state of `state_dict`."""


LenMode = Literal["full", "remaining"]
