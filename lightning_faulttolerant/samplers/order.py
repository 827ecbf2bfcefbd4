"""The order of the samples of an epoch, for all ranks together: a pure function of (seed, epoch, position).

The permutation of ``range(n)`` is computed, not stored: any part of it takes constant time and memory. It is a
generalized Feistel network. An index is written as a pair (left, right) of digits below a and b, both near the square
root of n. In turn, a pseudo-random function of one digit is added to the other, modulo its base. Each round can be
undone, so the network permutes the a * b pairs. A result of n or more goes through the network again until it is less.
That keeps it a permutation ("cycle walking"), and is rare, because a * b is hardly larger than n.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002. It is not encryption: the functions are fast
multiplicative hashes, chosen to make the order look random.

Each rank takes every n-th index of the part that is not consumed yet. So all ranks together have always consumed the
beginning of the order, for any number of ranks.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Protocol

import torch

from lightning_faulttolerant.streaming.world import current_world

OrderName = Literal["torch", "feistel"]
ORDERS = ("torch", "feistel")
_MOST_INT32 = 2**31 - 1
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # the range of torch's seeds; torch takes a negative one modulo 2**64


class SampleOrder(Protocol):
    """The order of one epoch: the sample at each position."""

    length: int
    """The number of samples."""

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices of the samples at `positions`, both int64, the positions in ``range(length)``."""


class SequentialOrder:
    """The samples in the order of the data set.

    Args:
        length: The number of samples.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the positions themselves."""
        return positions


class TorchOrder:
    """The order of ``torch.utils.data.DistributedSampler``: a permutation that is drawn whole, 4 bytes a sample.

    It is drawn when it is first needed, and is not pickled with the object.

    Args:
        length: The number of samples.
        seed: The seed of the permutation: torch's sampler takes its seed plus the epoch.
        generator: The state of the generator that draws the permutation, unless `seed` seeds it.
    """

    def __init__(self, length: int, *, seed: int, generator: bytes = b"") -> None:
        self.length = length
        self._seed, self._generator = seed, generator
        self._permutation: torch.Tensor | None = None

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the indices at `positions`."""
        if self._permutation is None:
            generator = seeded(self._seed)
            if self._generator:
                generator.set_state(torch.frombuffer(bytearray(self._generator), dtype=torch.uint8))
            self._permutation = drawn_permutation(self.length, generator)
        return self._permutation[positions].to(torch.int64)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_permutation": None}


def order_of(name: str, *, length: int, seed: int, epoch: int, shuffle: bool) -> SampleOrder:
    """Return the order of an epoch.

    Args:
        name: The kind of shuffle: ``"torch"`` or ``"feistel"``.
        length: The number of samples.
        seed: The seed of all epochs.
        epoch: The epoch, from 0.
        shuffle: Whether it is shuffled at all.
    """
    if not shuffle:
        return SequentialOrder(length)
    if name == "feistel":
        return FeistelPermutation(length, seed=seed, epoch=epoch)
    return TorchOrder(length, seed=seed + epoch)


def check_order(name: str) -> None:
    """Raise a ``ValueError`` unless `name` names an order."""
    if name not in ORDERS:
        raise ValueError(f"order={name!r}: it must be one of {', '.join(map(repr, ORDERS))}.")


def seeded(seed: int) -> torch.Generator:
    """Return a torch generator that starts from a seed. A seed plus epoch may exceed the range that torch accepts."""
    return torch.Generator().manual_seed(seed & _MOST_SEED)


def drawn_permutation(length: int, generator: torch.Generator) -> torch.Tensor:
    """Return the numbers of ``torch.randperm(length)``, shape ``(length,)``: int32 if they fit, else int64.

    torch draws the same numbers for each type. The shuffle waits for memory: half of it takes less time.
    """
    dtype = torch.int32 if length <= _MOST_INT32 else torch.int64
    return torch.randperm(length, generator=generator, dtype=dtype, device="cpu")


def checked_seed(seed: int, *, order: str) -> int:
    """Return `seed` as Python's integer.

    Args:
        seed: The seed of an order.
        order: The name of that order.

    Raises:
        ValueError: If it is not an integer, or if torch draws the order and its generators don't accept the seed.
    """
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise ValueError(f"seed={seed!r}: it must be an integer.") from error
    if order == "torch" and not _LEAST_SEED <= number <= _MOST_SEED:
        raise ValueError(
            f"seed={seed!r}: torch's generators take seeds from -2**63 to 2**64 - 1. Pass one of these; "
            "order='feistel' takes any integer."
        )
    return number


MAX_LENGTH = 2**60
"""With this limit, a digit has at most 31 bits, so no product in the network exceeds an int64."""
_NUM_ROUNDS, _NUM_ROUNDS_OF_FEW = 8, 16  # with 8, the 720 orders of 6 samples don't come equally often; with 12 they do
_FEW = 4096
_BITS = 31
_MASK = 2**_BITS - 1
_FIRST, _SECOND = 0x2C1B3C6D, 0x5BD1E995  # odd, below 2**31, with bits well spread
_NUM_TRIES = 64


class FeistelPermutation:
    """The permutation of ``range(length)`` for a `seed` and an `epoch`.

    Args:
        length: The number of integers to permute, 0 to 2**60.
        seed: Any integer.
        epoch: Any integer. Each epoch has its own permutation.

    Raises:
        ValueError: If `length` is out of its range.

    Example:
        >>> permutation = FeistelPermutation(10, seed=0, epoch=0)
        >>> sorted(permutation.at(torch.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, length: int, *, seed: int, epoch: int) -> None:
        if not 0 <= length <= MAX_LENGTH:
            raise ValueError(f"length is {length}; a permutation can have 0 to 2**60 elements.")
        self.length = length
        self._left, self._right = _digits(length)
        self._keys = _keys(length, seed, epoch)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the numbers at `positions`, an int64 tensor of any shape with values in ``range(length)``."""
        numbers = self._through_the_network(positions)
        while True:
            outside = numbers >= self.length
            if not outside.any():
                return numbers
            numbers[outside] = self._through_the_network(numbers[outside])

    def _through_the_network(self, numbers: torch.Tensor) -> torch.Tensor:
        left = torch.div(numbers, self._right, rounding_mode="floor")
        right = numbers - left * self._right
        for i in range(0, len(self._keys), 2):
            _add(left, self._left, of=right, key=self._keys[i])
            _add(right, self._right, of=left, key=self._keys[i + 1])
        return left.mul_(self._right).add_(right)


def _add(digit: torch.Tensor, base: int, *, of: torch.Tensor, key: int) -> None:
    """Add, modulo `base`, a number computed from `of` and `key`; each product is below 2**62."""
    hashed = of ^ key
    hashed *= _FIRST
    hashed ^= hashed >> 29
    hashed &= _MASK
    hashed *= _SECOND
    hashed >>= _BITS
    hashed &= _MASK
    hashed *= base
    hashed >>= _BITS
    digit += hashed
    digit -= (digit >= base) * base


def _digits(length: int) -> tuple[int, int]:
    """Return two bases near the root of `length` with a product of at least `length`, and hardly more."""
    root = max(1, math.isqrt(max(0, length - 1)) + 1)
    bases = range(root, root + min(_NUM_TRIES, root // 8 + 1))
    left = min(bases, key=lambda base: -length % base)
    return left, max(1, -(-length // left))


def _keys(length: int, seed: int, epoch: int) -> list[int]:
    text = f"feistel 1: {length} {seed} {epoch}".encode()
    num_rounds = _NUM_ROUNDS_OF_FEW if length < _FEW else _NUM_ROUNDS
    digest = hashlib.blake2b(text, digest_size=4 * num_rounds).digest()
    return [int.from_bytes(digest[i : i + 4], "little") & _MASK for i in range(0, len(digest), 4)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank among all.

    Args:
        rank: The rank, from 0.
        num_replicas: The number of ranks.
    """

    rank: int
    num_replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(
                f"rank is {self.rank}, but must be from 0 to num_replicas - 1; num_replicas is {self.num_replicas}."
            )


def place_of(*, num_replicas: int | None, rank: int | None) -> RankPlace:
    """Return the given place. A missing part is read from the process group or the environment now.

    Raises:
        ValueError: If the place doesn't exist.
    """
    if num_replicas is None or rank is None:
        world = current_world()
        num_replicas = world.num_ranks if num_replicas is None else num_replicas
        rank = world.rank if rank is None else rank
    return RankPlace(rank=rank, num_replicas=num_replicas)


_FIRST_CHUNK, _MAX_CHUNK = 1024, 16384  # little work before the first index, and little work per index later


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochPart:
    """One rank's part of an epoch.

    Args:
        length: The number of samples (or batches) in the epoch, for all ranks together.
        begin: The number of them that all ranks had consumed before.
        rank: The rank.
        num_replicas: The number of ranks.
        drop_last: Whether the last ones, too few to give each rank one, are left out. Otherwise each rank gets one; the
            missing ones come from the beginning of the order.
    """

    length: int
    begin: int = 0
    rank: int
    num_replicas: int
    drop_last: bool

    @property
    def num_own(self) -> int:
        """The number of units for this rank, and for each other rank."""
        left = max(0, self.length - self.begin)
        return left // self.num_replicas if self.drop_last else -(-left // self.num_replicas)

    def consumed(self, own: int) -> int:
        """Return the number that all ranks have consumed when each has consumed `own` of its part."""
        return self.begin + own * self.num_replicas

    def position(self, own: int) -> int:
        """Return the position in the order of this rank's unit `own`."""
        return (self.begin + self.rank + own * self.num_replicas) % self.length

    def positions(self, start: int, stop: int) -> torch.Tensor:
        """Return the positions in the order of this rank's samples `start` to `stop`, int64."""
        first, step = self.begin + self.rank, self.num_replicas
        positions = torch.arange(first + start * step, first + stop * step, step, dtype=torch.int64, device="cpu")
        if self.consumed(stop) > self.length:
            positions %= self.length
        return positions


def indices_of(
    order: SampleOrder, deal: EpochPart, *, skip: int = 0, at_end: Callable[[], None] | None = None
) -> Iterator[int]:
    """Yield this rank's indices after the first `skip`. The time to skip doesn't depend on their number.

    Args:
        order: The order of the epoch.
        deal: This rank's part of it.
        skip: The number of indices to leave out.
        at_end: Called when an index is requested after the last one.
    """
    return chain.from_iterable(_chunks(order, deal, skip, at_end))


def _chunks(order: SampleOrder, deal: EpochPart, start: int, at_end: Callable[[], None] | None) -> Iterator[list[int]]:
    size, end = _FIRST_CHUNK, deal.num_own
    while start < end:
        stop = min(end, start + size)
        yield order.at(deal.positions(start, stop)).tolist()
        start, size = stop, min(2 * size, _MAX_CHUNK)
    if at_end is not None:
        at_end()
