"""How many words a Mersenne Twister has drawn between two of its states, and its state after so many.

Python's, NumPy's older, and torch's generators of the processor are the same Mersenne Twister, each with another layout
of its state. A state with another layout is passed through unchanged: the caller keeps what differs.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from lightning_faulttolerant.state.packing import pack_torch

_NUM_WORDS = 624
_MOST_AT_ONCE = 16  # blocks of words: 80 kB, which stay in the cache of the processor
_HEAD = [("seed", "<u8"), ("left", "<i4"), ("seeded", "<i4"), ("next", "<u8")]
# By the length of a state: torch's, Python's, NumPy's.
_SIZE_OF_TORCH = 5056
_LAYOUTS = {
    _SIZE_OF_TORCH: [*_HEAD, ("words", "<u8", _NUM_WORDS), ("normal", "V40")],
    2509: [("words", "<u4", _NUM_WORDS), ("position", "<i4"), ("normal", "V9")],
    2513: [("kind", "V1"), ("words", "<u4", _NUM_WORDS), ("position", "<i4"), ("normal", "V12")],
}


def distance(state: bytes, later: bytes, *, most_blocks: int) -> tuple[int, bytes] | None:
    """Return the number of words drawn between two states, and what `advanced` returns for it.

    Args:
        state: The state of a generator.
        later: A later one.
        most_blocks: The number of blocks of 624 words to search.

    Returns:
        ``None`` if it is not found: the generator was seeded in between, or it is of another kind.
    """
    begun, end = _read(state), _read(later)
    if begun is None or end is None:
        return None
    num_blocks = 0 if (begun[0] == end[0]).all() else _num_blocks(begun[0], end[0], most_blocks)
    num_words = -1 if num_blocks is None else num_blocks * _NUM_WORDS + end[1] - begun[1]
    return None if num_words < 0 else (num_words, _written(state, *end) if num_words else state)


def advanced(state: bytes, num_words: int) -> bytes:
    """Return the state of a generator after it has drawn this many words."""
    read = _read(state)
    if read is None or not num_words:
        return state
    bits = _bits_at(*read)
    bits.random_raw(num_words, output=False)
    found = bits.state["state"]
    return _written(state, found["key"], found["pos"])


def shortened(state: bytes) -> bytes | list[int]:
    """Return a state of torch as its seed and the number of words drawn since, if these are all of it."""
    if len(state) != _SIZE_OF_TORCH:
        return state
    seed = int.from_bytes(state[:8], "little")  # as in `_HEAD`
    found = distance(lengthened([seed, 0]), state, most_blocks=64)
    return state if found is None or found[1] != state else [seed, found[0]]


def lengthened(short: bytes | list[int]) -> bytes:
    """Return the state that `shortened` was given."""
    if isinstance(short, bytes):
        return short
    return advanced(pack_torch(torch.Generator().manual_seed(short[0]).get_state()), short[1])


def _num_blocks(words: Any, later: Any, most: int) -> int | None:
    """Return how often all words must be renewed to become the later ones."""
    target = _bits_at(later, 0).random_raw(_NUM_WORDS)
    bits, before, size = _bits_at(words, _NUM_WORDS), 0, 1
    while before < most:
        drawn = bits.random_raw(size * _NUM_WORDS).reshape(size, _NUM_WORDS)
        for at in (drawn[:, 0] == target[0]).nonzero()[0].tolist():
            if (drawn[at] == target).all():
                return before + int(at) + 1
        before, size = before + size, min(4 * size, _MOST_AT_ONCE)
    return None


@functools.cache
def _bits() -> Any:
    return sys.modules["numpy"].random.MT19937(0)


def _bits_at(words: Any, position: int) -> Any:
    bits = _bits()
    bits.state = {"bit_generator": "MT19937", "state": {"key": words.tolist(), "pos": position}}
    return bits


def _fields(state: bytes) -> Any:
    """Return a copy of the fields of a state, without the kind of generator in front, or ``None``."""
    begin, numpy = 0 if len(state) in _LAYOUTS else state.find(b"\n") + 1, sys.modules.get("numpy")
    layout = _LAYOUTS.get(len(state) - begin)
    return None if layout is None or numpy is None else numpy.frombuffer(state, layout, offset=begin).copy()[0]


def _read(state: bytes) -> tuple[Any, int] | None:
    fields = _fields(state)
    if fields is None:
        return None
    is_torch = "left" in fields.dtype.names
    position = _NUM_WORDS + 1 - int(fields["left"]) if is_torch else int(fields["position"])
    return (fields["words"].astype("<u4"), position) if 0 <= position <= _NUM_WORDS else None


def _written(state: bytes, words: Any, position: int) -> bytes:
    """Return `state` with other words and another position."""
    fields = _fields(state)
    values = {"words": words, "position": position, "next": position, "left": _NUM_WORDS + 1 - position}
    for name in values.keys() & set(fields.dtype.names):
        fields[name] = values[name]
    return state[: -fields.nbytes] + bytes(fields.tobytes())
