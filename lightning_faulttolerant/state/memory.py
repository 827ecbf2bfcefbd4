"""States of Python's and NumPy's Mersenne Twisters, read directly from memory: 30 times as fast as their getters.

The position of a state in an object is not assumed. It is found once, with private generators, by comparison with the
getters. If it is not found, or for other types of generators, this module can't read the state and callers use the
getters. Only memory inside of the objects is read.
"""

from __future__ import annotations

import ctypes
import functools
import random
import struct
import sys
from collections.abc import Iterator
from typing import Any

_NUM_WORDS = 624
_WORDS_BYTES = 4 * _NUM_WORDS
_INDEX_BYTES = 4
_GAUSS = struct.Struct("<?d")
_DOUBLE = struct.Struct("<d")
_NO_GAUSS = struct.pack("<id", -1, 0.0)


def read_random(generator: random.Random) -> bytes | None:
    """Return the state as `packing.pack_random` would, or ``None`` if it can't be read here."""
    found = _python_offsets()
    if found is None or type(generator) is not random.Random:
        return None
    words, index = found
    address = id(generator)
    gauss = generator.gauss_next  # type: ignore[attr-defined]  # undocumented, but the third item of `getstate`
    return (
        ctypes.string_at(address + words, _WORDS_BYTES)
        + ctypes.string_at(address + index, _INDEX_BYTES)
        + _GAUSS.pack(gauss is not None, 0.0 if gauss is None else gauss)
    )


def read_random_state(generator: Any) -> bytes | None:
    """Return a ``RandomState``'s state as `packing.pack_numpy` would, or ``None`` if it can't be read here."""
    found = _numpy_offsets()
    numpy_random = sys.modules["numpy.random"]
    if found is None or type(generator) is not numpy_random.RandomState:
        return None
    # Read each time: `set_bit_generator` may replace it, even by one of another type.
    bits = generator._bit_generator
    if type(bits) is not numpy_random.MT19937:
        return None
    flag, gauss = found
    address = id(generator)
    # Flag and value of the cached second Gaussian belong to the RandomState, not to the bit generator.
    return b"M%b%b%b" % (
        ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES + _INDEX_BYTES),
        ctypes.string_at(address + flag, 4),
        ctypes.string_at(address + gauss, _DOUBLE.size),
    )


def read_bit_generator(bits: Any) -> bytes | None:
    """Return a bit generator's state as `packing.pack_numpy` would, or ``None`` if it can't be read here."""
    if _numpy_offsets() is None or type(bits) is not sys.modules["numpy.random"].MT19937:
        return None
    return b"M%b%b" % (ctypes.string_at(bits.ctypes.state_address, _WORDS_BYTES + _INDEX_BYTES), _NO_GAUSS)


@functools.cache
def _python_offsets() -> tuple[int, int] | None:
    """Return the positions of the words and of the index in a ``random.Random``."""
    if not _has_addresses():
        return None
    offsets = None
    for seed in range(3):
        generator = random.Random(seed)
        for _ in range(seed * 5):  # the index moves, the words don't
            generator.random()
        *words, index = generator.getstate()[1]
        image = _image(generator)
        known = (struct.pack(f"<{_NUM_WORDS}I", *words), struct.pack("<I", index))
        found = image.find(known[0])
        # Right before the words or right after them, and nowhere else.
        places = [found - _INDEX_BYTES, found + _WORDS_BYTES]
        places = [at for at in places if at >= 0 and image[at : at + _INDEX_BYTES] == known[1]]
        if found < 0 or len(places) != 1 or (offsets is not None and offsets != (found, places[0])):
            return None
        offsets = (found, places[0])
    return offsets


@functools.cache
def _numpy_offsets() -> tuple[int, int] | None:
    """Return the positions of flag and value of a ``RandomState``'s cached Gaussian, if all are where expected."""
    numpy_random = sys.modules["numpy.random"]
    if not _has_addresses():
        return None
    try:
        generator = numpy_random.RandomState(7)
        generator.randint(10, size=3)
        state = generator.get_state(legacy=False)
        bits = generator._bit_generator
        known = state["state"]["key"].tobytes() + struct.pack("<i", state["state"]["pos"])
        if ctypes.string_at(bits.ctypes.state_address, len(known)) != known:
            return None
        images = []
        for flag, gauss in ((0, 1.2345678), (1, 1.2345678), (1, -9.8765432)):
            generator.set_state({**state, "has_gauss": flag, "gauss": gauss})
            images.append((_image(generator), _DOUBLE.pack(gauss)))
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    (without, value), (with_flag, _), (other, other_value) = images
    flags = list(_differences(without, with_flag))
    place = with_flag.find(value)
    is_single = place >= 0 and with_flag.count(value) == 1 and len(flags) == 1
    is_alike = is_single and other[place : place + _DOUBLE.size] == other_value
    return (flags[0], place) if is_alike and with_flag[flags[0] : flags[0] + 4] == b"\1\0\0\0" else None


def _has_addresses() -> bool:
    return sys.implementation.name == "cpython" and sys.byteorder == "little"


def _image(value: object) -> bytes:
    return ctypes.string_at(id(value), type(value).__basicsize__)


def _differences(image: bytes, other: bytes) -> Iterator[int]:
    return (at for at, pair in enumerate(zip(image, other, strict=True)) if pair[0] != pair[1])
