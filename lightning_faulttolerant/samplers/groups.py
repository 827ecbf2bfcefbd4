"""Batches with samples of one group: formed from an order of samples, the same on every rank.

A batch is complete when its last sample comes in the order, so batches follow the order. The samples in the first k
batches are a pure function of the order, the groups, and the batch size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor

LEFTOVERS = ("pad", "mixed", "drop")


def group_numbers(group_ids: Sequence[Hashable] | Tensor) -> Tensor:
    """Return the group of each sample as an int64 number: from 0, in the order in which the groups appear."""
    values: Iterable[Hashable] = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    numbers: dict[Hashable, int] = {}
    return torch.tensor([numbers.setdefault(value, len(numbers)) for value in values], dtype=torch.int64, device="cpu")


def digest_of(groups: Tensor) -> str:
    """Return a short string that another grouping of the samples would not have."""
    digest = hashlib.blake2b(digest_size=8)
    for start in range(0, len(groups), 65536):
        digest.update(repr(groups[start : start + 65536].tolist()).encode())
    return digest.hexdigest()


def num_batches(groups: Tensor, *, batch_size: int, leftover: str, drop_last: bool) -> int:
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

    full: Tensor
    rest: list[list[int]]

    def __len__(self) -> int:
        return len(self.full) + len(self.rest)

    def at(self, position: int) -> list[int]:
        """Return the indices of one batch."""
        if position < len(self.full):
            return list(self.full[position].tolist())
        return list(self.rest[position - len(self.full)])

    def only_full(self, batch_size: int) -> Batches:
        """Return the batches that have `batch_size` samples."""
        return Batches(self.full, [batch for batch in self.rest if len(batch) == batch_size])

    def samples(self, num_batches: int) -> Tensor:
        """Return the indices of the first `num_batches`, in one int64 tensor."""
        rest = [index for batch in self.rest[: max(0, num_batches - len(self.full))] for index in batch]
        return torch.cat([self.full[:num_batches].reshape(-1), torch.tensor(rest, dtype=torch.int64, device="cpu")])


def form_batches(indices: Tensor, groups: Tensor, *, batch_size: int, leftover: str, whole_order: Tensor) -> Batches:
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


def _padded(left: Tensor, groups: Tensor, batch_size: int, whole_order: Tensor) -> list[list[int]]:
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
    order: Tensor, groups: Tensor, *, batch_size: int, num_replicas: int, progress: int, drop_last: bool
) -> Tensor:
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
