"""A computed permutation of ``range(n)`` that is not stored: any part of it takes constant time and memory.

It is a generalized Feistel network. An index is written as a pair (left, right) of digits below a and b, both near the
square root of n. In turn, a pseudo-random function of one digit is added to the other, modulo its base. Each round can
be undone, so the network permutes the a * b pairs. A result of n or more goes through the network again until it is
less. That keeps it a permutation ("cycle walking"), and is rare, because a * b is hardly larger than n.

Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002. It is not encryption: the functions are fast
multiplicative hashes, chosen to make the order look random.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

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
            raise ValueError(f"length is {length}; a permutation is made of 0 to 2**60 numbers.")
        self.length = length
        self._left, self._right = _digits(length)
        self._keys = _keys(length, seed, epoch)

    def at(self, positions: Tensor) -> Tensor:
        """Return the numbers at `positions`, an int64 tensor of any shape with values in ``range(length)``."""
        numbers = self._through_the_network(positions)
        while True:
            outside = numbers >= self.length
            if not outside.any():
                return numbers
            numbers[outside] = self._through_the_network(numbers[outside])

    def _through_the_network(self, numbers: Tensor) -> Tensor:
        left = torch.div(numbers, self._right, rounding_mode="floor")
        right = numbers - left * self._right
        for i in range(0, len(self._keys), 2):
            _add(left, self._left, of=right, key=self._keys[i])
            _add(right, self._right, of=left, key=self._keys[i + 1])
        return left.mul_(self._right).add_(right)


def _add(digit: Tensor, base: int, *, of: Tensor, key: int) -> None:
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
