"""Random numbers from counters: each can be computed without those before it.

The bits are defined here and do not come from a library's generator. So an order is the same under every version of
numpy and on every machine. A key is the BLAKE2b hash of its parts. A number is SplitMix64 of a key and a counter.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def key_of(*parts: int | str) -> int:
    """Return the 64-bit key for ``parts``: a use, a seed, an epoch, a number."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def numbers(key: int, count: int) -> npt.NDArray[np.uint64]:
    """Return ``count`` random 64-bit numbers, as uint64.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    mixed *= np.uint64(_STEP)
    mixed += np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= _FIRST
    mixed ^= mixed >> np.uint64(27)
    mixed *= _SECOND
    mixed ^= mixed >> np.uint64(31)
    return mixed


def permutation(key: int, count: int) -> Ints:
    """Return a permutation of ``range(count)``, as int64.

    The low bits of each random number are replaced by its index, so no two are equal. The sorted result therefore does
    not depend on the sorting algorithm, and sorting values is several times faster than sorting indices.
    """
    bits = np.uint64(max(count - 1, 1).bit_length())
    drawn = numbers(key, count)
    drawn >>= bits
    drawn <<= bits
    drawn |= np.arange(count, dtype=np.uint64)
    drawn.sort()
    drawn &= (np.uint64(1) << bits) - np.uint64(1)
    return drawn.view(np.int64)
