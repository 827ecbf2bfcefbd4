"""A distributed batch sampler with batches of one group each, and a position that can be saved and resumed.

A batch is complete when its last sample comes in the order, so batches follow the order. The samples in the first k
batches are a pure function of the order, the groups, and the batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

import torch
from torch.utils.data import DistributedSampler

from lightning_faulttolerant.samplers.order import EpochPart, OrderName, order_of
from lightning_faulttolerant.samplers.progress import (
    Interruptible,
    LenMode,
    check_not_too_far,
    check_same,
    read_position,
)

LEFTOVERS = ("pad", "mixed", "drop")


def group_numbers(group_ids: Sequence[Hashable] | torch.Tensor) -> torch.Tensor:
    """Return the group of each sample as an int64 number: from 0, in the order in which the groups appear."""
    values: Iterable[Hashable] = group_ids.tolist() if isinstance(group_ids, torch.Tensor) else group_ids
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64, device="cpu")


def digest_of(groups: torch.Tensor) -> str:
    """Return a short string that another grouping of the samples would not have."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(groups), 65536):
        digest.update(repr(groups[start : start + 65536].tolist()).encode())
    return digest.hexdigest()


def num_batches(groups: torch.Tensor, *, batch_size: int, leftover: str, drop_last: bool) -> int:
    """Return the number of batches of all samples. It is the same in each order."""
    counts = torch.bincount(groups)
    whole = int((counts // batch_size).sum())
    if leftover == "drop":
        return whole
    rest = counts % batch_size
    if leftover == "pad":
        return whole + int((rest > 0).sum())
    mixed = int(rest.sum())
    return whole + (mixed // batch_size if drop_last else -(-mixed // batch_size))


@dataclass(frozen=True, slots=True)
class Batches:
    """Index batches: full ones of one group each, in a tensor of shape (number, batch size), and leftover batches.

    The leftover batches come last.
    """

    full: torch.Tensor
    rest: list[list[int]]

    def __len__(self) -> int:
        return len(self.full) + len(self.rest)

    def at(self, position: int) -> list[int]:
        """Return the indices of one batch."""
        if position < len(self.full):
            return list(self.full[position].tolist())
        return list(self.rest[position - len(self.full)])

    def samples(self, num_batches: int) -> torch.Tensor:
        """Return the indices of the first `num_batches`, in one int64 tensor."""
        rest = [index for batch in self.rest[: max(0, num_batches - len(self.full))] for index in batch]
        return torch.cat([self.full[:num_batches].reshape(-1), torch.tensor(rest, dtype=torch.int64, device="cpu")])


def form_batches(
    indices: torch.Tensor, groups: torch.Tensor, *, batch_size: int, leftover: str, whole_order: torch.Tensor
) -> Batches:
    """Return the batches of samples.

    Args:
        indices: The samples of the batches, int64, in their order.
        groups: The group of every sample of the data set.
        batch_size: The size of each batch.
        leftover: The treatment of samples that don't fill a batch of their group. ``"pad"`` fills it up with the first
            samples of the group. ``"mixed"`` joins them, in their order, into batches of several groups; the last one
            may be short. ``"drop"`` leaves them out.
        whole_order: All samples of the epoch in their order. The padding is taken from it.
    """
    by_group = torch.argsort(groups[indices], stable=True)  # positions in the order, group by group
    counts = torch.bincount(groups[indices], minlength=1)
    ends = torch.cumsum(counts, 0)
    within = torch.arange(len(indices), device="cpu") - (ends - counts)[groups[indices[by_group]]]
    is_full = within < (counts - counts % batch_size)[groups[indices[by_group]]]
    rows = by_group[is_full].reshape(-1, batch_size)
    full = indices[rows[torch.argsort(rows[:, -1])]]
    left = by_group[~is_full]
    if leftover == "drop" or not len(left):
        return Batches(full, [])
    if leftover == "mixed":
        mixed = indices[left.sort().values].tolist()
        return Batches(full, [mixed[start : start + batch_size] for start in range(0, len(mixed), batch_size)])
    return Batches(full, _padded(indices[left], groups, batch_size, whole_order))


def _padded(left: torch.Tensor, groups: torch.Tensor, batch_size: int, whole_order: torch.Tensor) -> list[list[int]]:
    """Fill up the leftover samples of each group, the most first, from the beginning of the group."""
    by_group: dict[int, list[int]] = {}
    for index, group in zip(left.tolist(), groups[left].tolist(), strict=True):
        by_group.setdefault(group, []).append(index)
    members: dict[int, list[int]] = {group: [] for group in by_group}
    sorted_groups, places = torch.sort(groups[whole_order], stable=True)
    for group, found in members.items():
        first, end = torch.searchsorted(sorted_groups, torch.tensor([group, group + 1])).tolist()
        found += whole_order[places[first : min(end, first + batch_size)]].tolist()
    batches = sorted(by_group.items(), key=lambda item: (-len(item[1]), item[0]))
    return [[*found, *islice(cycle(members[group]), batch_size - len(found))] for group, found in batches]


def consumed_by_the_original(
    order: torch.Tensor, groups: torch.Tensor, *, batch_size: int, num_replicas: int, progress: int, drop_last: bool
) -> torch.Tensor:
    """Return the samples that ranks of the original library had consumed, `progress` batches each.

    There each rank forms batches from its own part of the order, padded to equal parts, as many as its part would fill.
    Of the leftover samples, the groups with the most are filled up, until that number is reached.
    """
    size = (len(order) if drop_last else len(order) + num_replicas - 1) // num_replicas * num_replicas
    padded = order.repeat(-(-size // max(1, len(order))))[:size]
    consumed = []
    for rank in range(num_replicas):
        own = padded[rank::num_replicas]
        found = form_batches(own, groups, batch_size=batch_size, leftover="pad", whole_order=own)
        consumed.append(found.samples(min(progress, -(-len(own) // batch_size))))
    return torch.cat(consumed)


Leftover = Literal["pad", "mixed", "drop"]
_Part = dict[str, int]  # the units consumed in an epoch with one batch size


class EpochForwarder:
    """Passes the epoch on to a batch sampler.

    Args:
        batch_sampler: The batch sampler.
    """

    def __init__(self, batch_sampler: InterruptibleDistributedGroupedBatchSampler) -> None:
        self._batch_sampler = batch_sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch."""
        self._batch_sampler.set_epoch(epoch)


class InterruptibleDistributedGroupedBatchSampler(Interruptible, DistributedSampler[list[int]]):  # type: ignore[misc,override]
    """Deal batches to ranks, each with samples of one group (images of similar shape, texts of similar length).

    Batches are formed from the epoch's order for all ranks together, and dealt in turn: rank r takes every
    ``num_replicas``-th batch, starting at r. Progress counts batches. A different number of ranks can continue a state:
    they are dealt the rest of the batches. So can another batch size: new batches are formed from the samples that were
    not consumed. No sample is lost.

    Pass it to a loader as ``batch_sampler``. Lightning can't insert a distributed sampler into a batch sampler that is
    not torch's: create the Trainer with ``use_distributed_sampler=False``. It still calls `set_epoch`.

    Args:
        dataset: The data set, of which only the length is read, or that length itself.
        group_ids: The group of each sample, any hashable value; as many as there are samples.
        batch_size: The number of samples in a batch.
        num_replicas: The number of ranks; by default read from the process group, else from the environment.
        rank: The rank of this process, from 0; by default found in the same way.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders; the same on all ranks.
        drop_last: Whether to leave out batches that are not full, and the last batches if they are too few to give one
            to each rank. Otherwise the other ranks get one of the first batches again.
        leftover: The treatment of samples that don't fill a batch of their group. ``"pad"`` fills it up with the first
            samples of that group in the epoch. ``"mixed"`` joins them into batches of several groups; the last of these
            may be short. ``"drop"`` leaves them out. The default is ``"pad"``, or ``"drop"`` with `drop_last`.
        order: The order of the samples, as in `InterruptibleDistributedSampler`.
        len_mode: The value of ``len``, in batches, after a resume. ``"full"``: that of the whole epoch; or
            ``"remaining"``.

    Raises:
        ValueError: If an argument has an invalid value, or `group_ids` is not as long as `dataset`.

    Example:
        >>> sampler = InterruptibleDistributedGroupedBatchSampler(
        ...     range(6), [0, 1, 0, 1, 0, 1], batch_size=2, num_replicas=1, rank=0, shuffle=False
        ... )
        >>> list(sampler)
        [[0, 2], [1, 3], [4, 0], [5, 1]]
    """

    kind = "grouped"
    _kept = (*Interruptible._kept, "_consumed_before")

    def __init__(
        self,
        dataset: Sized | int,
        group_ids: Sequence[Hashable] | torch.Tensor,
        batch_size: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        leftover: Leftover | None = None,
        order: OrderName = "torch",
        len_mode: LenMode = "full",
    ) -> None:
        Interruptible.__init__(
            self,
            dataset,
            unit="batches",
            shuffle=shuffle,
            seed=seed,
            order=order,
            num_replicas=num_replicas,
            rank=rank,
            drop_last=drop_last,
            len_mode=len_mode,
        )
        if len(group_ids) != len(self.dataset):
            raise ValueError(
                f"group_ids has {len(group_ids)} entries, but the data set has {len(self.dataset)} samples. "
                "Each sample needs a group."
            )
        if not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size={batch_size!r}: it must be a positive integer.")
        self.leftover = leftover or ("drop" if drop_last else "pad")
        if self.leftover not in LEFTOVERS:
            raise ValueError(f"leftover={leftover!r}: it must be one of {', '.join(map(repr, LEFTOVERS))}.")
        self.batch_size = batch_size
        self.group_ids = group_ids
        self._groups = group_numbers(group_ids)
        self._digest = digest_of(self._groups)
        self._num_batches = num_batches(
            self._groups, batch_size=batch_size, leftover=self.leftover, drop_last=drop_last
        )
        self._formed: tuple[object, Batches] | None = None

    def _restart(self, epoch: int, *, begin: int = 0, is_restored: bool = False) -> None:
        super()._restart(epoch, begin=begin, is_restored=is_restored)
        self._consumed_before: list[_Part] = []

    @property
    def sampler(self) -> EpochForwarder:
        """The object that passes the epoch on: Lightning looks here for the `set_epoch` of a batch sampler."""
        return EpochForwarder(self)

    @property
    def num_batches(self) -> int:
        """The number of batches of a whole epoch for each rank."""
        return self._whole()

    def _length(self) -> int:
        return len(self._batches(self.epoch, self._consumed_before)) if self._consumed_before else self._num_batches

    def _whole(self) -> int:
        return self._deal(length=self._num_batches, begin=0).num_own

    def _batches(self, epoch: int, consumed_before: Sequence[_Part]) -> Batches:
        """Return the batches, for all ranks, of the samples that were not consumed with other batch sizes."""
        key = (epoch, consumed_before)
        if self._formed is None or self._formed[0] != key:
            self._formed = (epoch, [dict(part) for part in consumed_before]), self._form(epoch, consumed_before)
        return self._formed[1]

    def _form(self, epoch: int, consumed_before: Sequence[_Part]) -> Batches:
        groups, length = self._groups, len(self._groups)
        every = order_of(self.order_name, length=length, seed=self.seed, epoch=epoch, shuffle=self.shuffle)
        order = rest = every.at(torch.arange(length, device="cpu"))
        for part in consumed_before:
            size, number, ranks = part["batch_size"], part["num_batches"], part["original_replicas"]
            if ranks:
                consumed = consumed_by_the_original(
                    order, groups, batch_size=size, num_replicas=ranks, progress=number, drop_last=self.drop_last
                )
            else:
                formed = form_batches(rest, groups, batch_size=size, leftover=self.leftover, whole_order=order)
                consumed = formed.samples(number)
            is_left = torch.ones(length, dtype=torch.bool, device="cpu")
            is_left[consumed] = False
            rest = rest[is_left[rest]]
        found = form_batches(rest, groups, batch_size=self.batch_size, leftover=self.leftover, whole_order=order)
        return Batches(found.full, [one for one in found.rest if len(one) == self.batch_size or not self.drop_last])

    def _iterate(self, skip: int) -> Iterator[list[int]]:
        deal = self.deal()
        return self._dealt(self._batches(self.epoch, self._consumed_before), deal, range(skip, deal.num_own))

    def _dealt(self, batches: Batches, deal: EpochPart, own: range) -> Iterator[list[int]]:
        for i in own:
            yield batches.at(deal.position(i))
        self._note_end()

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_formed": None}

    def advance(self, n: int = 1) -> None:
        """Count `n` more batches as consumed by this rank.

        Raises:
            AdvancedTooFarError: If fewer are left; nothing is counted then.
            ValueError: If `n` is negative.
        """
        super().advance(n)

    def _order_arguments(self) -> dict[str, object]:
        return {**super()._order_arguments(), "leftover": self.leftover, "groups": self._digest}

    def state_dict(self) -> dict[str, Any]:
        """Return the sampler's position. The end of an epoch is the beginning of the next one.

        ``global_consumed`` counts the batches of ``batch_size`` that all ranks have consumed, after those of other
        batch sizes in ``consumed_before``. ``progress`` counts this rank's batches, as in the original's state.
        """
        state = super().state_dict()
        is_begun = state["epoch"] == self.epoch
        return {
            **state,
            "batch_size": self.batch_size,
            "consumed_before": [dict(part) for part in self._consumed_before] if is_begun else [],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Continue from a state of `state_dict`, of this package or of the original library.

        Args:
            state_dict: A state of this sampler, with any number of ranks and any batch size, or the original's
                ``{"progress", "epoch"}``. The latter is assumed to have the current number of ranks and batch size.
                There each rank forms its own batches. Their samples are found again, and new batches are formed from
                the rest.
            strict: Whether other groups, data, seed, shuffle, order, drop_last, or leftover are an error. Otherwise
                they are logged, and only the position is kept.

        Raises:
            FingerprintMismatchError: If one of these differs, and `strict`. Both values are shown.
            AdvancedTooFarError: If the position is after the epoch's end.
            ValueError: If it is not a state of this kind of sampler.
        """
        position = read_position(state_dict, kind=self.kind)
        begin, before = position.consumed, [dict(part) for part in state_dict.get("consumed_before", [])]
        if position.is_original:
            ranks = self.place().num_replicas
            own = len(self._groups) // ranks if self.drop_last else -(-len(self._groups) // ranks)
            check_not_too_far(begin, -(-own // self.batch_size), "batches of each rank")
            before, begin = _with_part(before, batch_size=self.batch_size, number=begin, original_replicas=ranks), 0
        else:
            check_same(state_dict, self._order_arguments(), strict=strict)
            if state_dict["batch_size"] != self.batch_size:
                before = _with_part(before, batch_size=state_dict["batch_size"], number=begin)
                begin = 0
        length = len(self._batches(position.epoch, before)) if before else self._num_batches
        deal = self._deal(length=length, begin=begin)
        ranks = position.num_replicas or 1
        check_not_too_far(begin, -(-length // ranks) * ranks, "batches")
        if deal.num_own == 0 and (begin or before):
            self._restart(position.epoch + 1, is_restored=True)
        else:
            self._restart(position.epoch, begin=begin, is_restored=True)
            self._consumed_before = before


def _with_part(before: list[_Part], *, batch_size: int, number: int, original_replicas: int = 0) -> list[_Part]:
    if not number:
        return before
    return [*before, {"batch_size": batch_size, "num_batches": number, "original_replicas": original_replicas}]
