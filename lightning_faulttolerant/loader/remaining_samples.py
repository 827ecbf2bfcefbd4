"""The samples of a loader that no rank has consumed, also after ranks that were not at the same place.

Without padding, rank r gets every n-th sample, and the ranks may have different numbers of batches. Of several loaders
that come one after the other, one rank may already be in the next one. What is left is then not one
contiguous end of the order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Sampler

_CHUNK = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """The rest of a loader's samples, of which each rank gets every n-th one.

    Args:
        length: The number of samples in the loader.
        consumed: For each earlier number of ranks, in order: how many of its own samples each rank has consumed.
    """

    length: int
    consumed: tuple[tuple[int, ...], ...] = ()

    def positions(self) -> Tensor:
        """Return the places of these samples in the loader's order, int64, ascending."""
        rest = torch.arange(self.length, dtype=torch.int64, device="cpu")
        for of_ranks in self.consumed:
            is_left = torch.ones(len(rest), dtype=torch.bool, device="cpu")
            for rank, num in enumerate(of_ranks):
                is_left[rank : rank + num * len(of_ranks) : len(of_ranks)] = False
            rest = rest[is_left]
        return rest

    def of_rank(self, rank: int, num_ranks: int) -> Tensor:
        """Return the places of those samples that one of `num_ranks` ranks gets."""
        return self.positions()[rank::num_ranks]

    @property
    def begin(self) -> int | None:
        """How many samples were consumed, if they are the beginning of the order; ``None`` if they are not."""
        rest = self.positions()
        begin = self.length - len(rest)
        return begin if not len(rest) or int(rest[0]) == begin else None


class ListedIndices(Sampler[int]):
    """A sampler that yields the indices it was given.

    Args:
        indices: The indices, int64.
    """

    def __init__(self, indices: Tensor) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self._indices), _CHUNK):
            yield from self._indices[begin : begin + _CHUNK].tolist()

    def __len__(self) -> int:
        return len(self._indices)
