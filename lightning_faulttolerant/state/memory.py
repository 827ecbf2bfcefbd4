"""The states of Python's and NumPy's Mersenne Twisters, read and written directly in memory.

This is 20 to 100 times as fast as their getters and setters. The place of a state in an object is not assumed. It is
found once, with private generators, by comparison with the getters. If it is not found, or for other types of
generators, the getters and setters are used. Only memory inside of the objects is read and written.
"""

from __future__ import annotations

import ctypes
import functools
import os
import random
import struct
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any, Protocol, final

import torch

_NUM_WORDS = 624
_WORDS_BYTES = 4 * _NUM_WORDS
_INDEX_BYTES = 4
_GAUSS = struct.Struct("<?d")
_DOUBLE = struct.Struct("<d")
_NO_GAUSS = struct.pack("<id", -1, 0.0)


def read_random(generator: random.Random) -> bytes | None:
    """Return the state as `packing.pack_random` does, or ``None`` if it can't be read here."""
    memory = memory_of_python(generator)
    return None if memory is None else memory.state()


def read_random_state(generator: object) -> bytes | None:
    """Return a ``RandomState``'s state as `packing.pack_numpy` does, or ``None`` if it can't be read here."""
    memory = memory_of_numpy(generator)
    return None if memory is None else memory.state()


def read_bit_generator(bits: Any) -> bytes | None:
    """Return a bit generator's state as `packing.pack_numpy` does, or ``None`` if it can't be read here."""
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
    flags = _differences(without, with_flag)
    place = with_flag.find(value)
    is_single = place >= 0 and with_flag.count(value) == 1 and len(flags) == 1
    is_alike = is_single and other[place : place + _DOUBLE.size] == other_value
    return (flags[0], place) if is_alike and with_flag[flags[0] : flags[0] + 4] == b"\1\0\0\0" else None


def _has_addresses() -> bool:
    return sys.implementation.name == "cpython" and sys.byteorder == "little"


def _image(value: object) -> bytes:
    return ctypes.string_at(id(value), type(value).__basicsize__)


def _differences(image: bytes, other: bytes) -> list[int]:
    """Return the positions of the bytes that differ. Few do: thousands are compared in each start of a process."""
    bits, places = int.from_bytes(image, "little") ^ int.from_bytes(other, "little"), []
    while bits:
        places.append(((bits & -bits).bit_length() - 1) // 8)
        bits &= ~(0xFF << 8 * places[-1])
    return places


@functools.cache
def _items_at() -> int | None:
    """Return the position in a list of the pointer to its items, between their number and the allocated space."""
    items, at = [object() for _ in range(3)], object.__basicsize__ + _POINTER_BYTES
    if not _has_addresses() or list.__basicsize__ != at + 2 * _POINTER_BYTES:
        return None
    length, _, allocated = struct.unpack_from("<3q", _image(items), object.__basicsize__)
    return at if length == len(items) <= allocated < _MAX_BYTES else None


def ids_in(items: list[Any]) -> bytes:
    """Return the ``id`` of each item, 8 bytes each. This is many times as fast as a call of ``id`` for each."""
    at = _items_at()
    if at is None:
        return struct.pack(f"<{len(items)}q", *map(id, items))
    pointer = ctypes.c_void_p.from_address(id(items) + at).value
    return b"" if pointer is None else ctypes.string_at(pointer, _POINTER_BYTES * len(items))


_NUM_MARKED = 32
"""A draw moves the index, and each 624 draws replace all words. Seeding replaces all but the first. So the index and
32 words (1,024 bits) tell two states apart, without a look at the whole state."""
_MARKED_BYTES = 4 * _NUM_MARKED


def _view(address: int, num_bytes: int) -> memoryview:
    """Return memory that can be read and written. It is valid as long as its object exists."""
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(address)).cast("B")


class StateMemory(Protocol):
    """The memory of one generator. ``views`` are its parts that show a change: if these are the same, the state is."""

    generator: Any
    views: tuple[memoryview, ...]

    def is_current(self) -> bool:
        """Return whether the generator still has this memory."""

    def state(self) -> bytes:
        """Return the state, packed: the same object, if it has not changed since the last call."""

    def save(self) -> Any:
        """Return the state as it was in the last call of `state`, for `restore`."""

    def restore(self, saved: Any) -> None:
        """Set the generator to a state of `save`."""


@final
class PythonMemory:
    """The memory of one ``random.Random``.

    Args:
        generator: The generator.
        words: Where its words are, from its address.
        index: Where its index is, right before or right after the words.
    """

    __slots__ = ("_blob", "_image", "_is_index_first", "_mark", "_memory", "gauss", "generator", "views")

    def __init__(self, generator: random.Random, words: int, index: int) -> None:
        self.generator: Any = generator
        self._is_index_first = index < words
        self._memory = _view(id(generator) + min(words, index), _WORDS_BYTES + _INDEX_BYTES)
        num_bytes = _MARKED_BYTES + _INDEX_BYTES
        self.views: tuple[memoryview, ...] = (
            self._memory[:num_bytes] if self._is_index_first else self._memory[-num_bytes:],
        )
        self._mark = self._blob = self._image = b""
        self.gauss: float | None = None

    def is_current(self) -> bool:
        """Return whether the generator still has this memory."""
        return True

    def state(self) -> bytes:
        """Return the state as `packing.pack_random` does: the same object, if it has not changed since."""
        mark = b"".join(self.views)
        if mark != self._mark or self.generator.gauss_next is not self.gauss:
            self._mark, self.gauss, self._image = mark, self.generator.gauss_next, self._memory.tobytes()
            at, gauss, image = _INDEX_BYTES if self._is_index_first else 0, self.gauss, self._image
            words, index = image[at : at + _WORDS_BYTES], image[:at] + image[at + _WORDS_BYTES :]
            self._blob = words + index + _GAUSS.pack(gauss is not None, 0.0 if gauss is None else gauss)
        return self._blob

    def save(self) -> tuple[bytes, float | None]:
        """Return the state as it was in the last call of `state`, for `restore`."""
        return self._image, self.gauss

    def restore(self, saved: tuple[bytes, float | None]) -> None:
        """Set the generator to a state of `save`."""
        self._memory[:], self.generator.gauss_next = saved


@final
class NumpyMemory:
    """The memory of one ``RandomState`` over MT19937.

    Args:
        generator: The generator.
        flag: Where the flag of its cached Gaussian is, from its address.
        gauss: Where the Gaussian is.
    """

    __slots__ = (
        "_at",
        "_blob",
        "_image",
        "_mark",
        "_memory",
        "_tail",
        "bits",
        "generator",
        "views",
    )

    def __init__(self, generator: Any, flag: int, gauss: int) -> None:
        self.generator, self.bits = generator, generator._bit_generator
        first, end = min(flag, gauss), max(flag + 4, gauss + _DOUBLE.size)
        self._at = (flag - first, gauss - first)
        self._memory = _view(self.bits.ctypes.state_address, _WORDS_BYTES + _INDEX_BYTES)
        self._tail = _view(id(generator) + first, end - first)
        self.views: tuple[memoryview, ...] = self._memory[-_MARKED_BYTES - _INDEX_BYTES :], self._tail
        self._mark = self._image = self._blob = b""

    def is_current(self) -> bool:
        """Return whether the generator still has this memory, and no other bit generator."""
        return self.generator._bit_generator is self.bits

    def state(self) -> bytes:
        """Return the state as `packing.pack_numpy` does: the same object, if it has not changed since."""
        mark = b"".join(self.views)
        if mark != self._mark:
            self._mark, self._image, tail = mark, self._memory.tobytes(), self._saved_tail(mark)
            flag, gauss = self._at
            self._blob = b"M%b%b%b" % (self._image, tail[flag : flag + 4], tail[gauss : gauss + _DOUBLE.size])
        return self._blob

    def save(self) -> tuple[bytes, bytes]:
        """Return the state as it was in the last call of `state`, for `restore`."""
        return self._image, self._saved_tail(self._mark)

    def _saved_tail(self, mark: bytes) -> bytes:
        return mark[-len(self._tail) :]

    def restore(self, saved: tuple[bytes, bytes]) -> None:
        """Set the generator to a state of `save`. If it has another bit generator now, NumPy's setter decides."""
        image, tail = saved
        with self.bits.lock:
            self._memory[:] = image
        if self.is_current():
            self._tail[:] = tail
        else:
            flag, gauss = self._at
            cached = {"has_gauss": tail[flag], "gauss": _DOUBLE.unpack_from(tail, gauss)[0]}
            self.generator.set_state({**self.bits.state, **cached})


@final
class TorchMemory:
    """The state of one ``torch.Generator`` on the CPU. Memory only shows whether it has changed: the getter reads it.

    Args:
        generator: The generator.
        parts: The two parts of the memory of torch's own object that show a change, from its address: the first byte,
            and the number of bytes.
    """

    __slots__ = (
        "_blob",
        "_mark",
        "_state",
        "address",
        "generator",
        "pointer",
        "views",
    )

    def __init__(self, generator: torch.Generator, parts: tuple[tuple[int, int], tuple[int, int]]) -> None:
        self.generator: Any = generator
        self.pointer = _view(id(generator) + _POINTER_AT, _POINTER_BYTES)
        self.address = self.pointer.tobytes()
        address = int.from_bytes(self.address, "little")
        self.views: tuple[memoryview, ...] = tuple(_view(address + first, num_bytes) for first, num_bytes in parts)
        self._mark = self._blob = b""
        self._state: torch.Tensor | None = None

    def is_current(self) -> bool:
        """Return whether the generator still has this memory."""
        return self.pointer.tobytes() == self.address

    def state(self) -> bytes:
        """Return the state as `packing.pack_torch` does: the same object, if it has not changed since."""
        mark = b"".join(self.views)
        if mark != self._mark:
            self._mark = mark
            self._state = state = self.generator.get_state()
            self._blob = ctypes.string_at(state.data_ptr(), state.nbytes)
        return self._blob

    def save(self) -> torch.Tensor:
        """Return the state as it was in the last call of `state`, for `restore`."""
        assert self._state is not None
        return self._state

    def restore(self, saved: torch.Tensor) -> None:
        """Set the generator to a state of `save`."""
        self.generator.set_state(saved)


_POINTER_BYTES = 8
_POINTER_AT = object.__basicsize__
_MAX_BYTES = 4_096  # torch's object is 2,624 bytes long
_MARGIN_BYTES = 64
_HEAD_BYTES, _TAIL_BYTES, _LAST_BYTES = 24, 40, 8  # of a state of the getter: before and after the words; flags


@functools.cache
def _torch_parts() -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Return the parts of the memory of torch's own object that show a change, for `TorchMemory`.

    Each byte of a state but those of the words is changed. Each change that the getter shows must show there.
    """
    generator, words = torch.Generator(), None
    for seed in (3, 7, 11):
        torch.rand(seed, generator=generator.manual_seed(seed), device="cpu")
        found = _words_in(generator)
        if found is None or found < _MARGIN_BYTES or words not in (None, found):
            return None
        words = found
    assert words is not None
    end_of_words = words + _WORDS_BYTES
    first, end = words, end_of_words
    shown = slice(words - _MARGIN_BYTES, end_of_words + _MARGIN_BYTES)
    torch.randn(1, generator=generator, device="cpu")  # leaves a cached Gaussian
    for base, other in _neighbors(generator):
        before, after = (_image_after(generator, state) for state in (base, other))
        places = _differences(before[shown], after[shown])
        if not places:
            return None
        first, end = min(first, shown.start + places[0]), max(end, shown.start + places[-1] + 1)
    return (first, words + _MARKED_BYTES - first), (end_of_words, end - end_of_words)


def _words_in(generator: torch.Generator) -> int | None:
    """Return where the words of a generator are, from the address of torch's own object."""
    state = generator.get_state()
    in_state = ctypes.string_at(state.data_ptr() + _HEAD_BYTES, 2 * _WORDS_BYTES)
    words = struct.pack(f"<{_NUM_WORDS}I", *struct.unpack(f"<{_NUM_WORDS}Q", in_state))
    found = _image_of_torchs(generator).find(words)
    return None if found < 0 else found


def _neighbors(generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of states that differ in one byte outside of the words, and that the getter tells apart."""
    bases = [generator.get_state()]
    num_bytes = bases[0].numel()
    head, tail = range(_HEAD_BYTES), range(num_bytes - _TAIL_BYTES, num_bytes)
    last = tail[-_LAST_BYTES:]  # some values count only with the flag at the end
    for number, base in enumerate(bases):
        kept = _kept(generator, base)
        for place, bits in product(last if number else (*head, *tail), (0x01, 0xFF)):
            other = base.clone()
            other[place] ^= bits
            found = _kept(generator, other)
            if found is not None and found != kept:
                yield base, other
                if not number and place in last:
                    bases.append(other)


def _kept(generator: torch.Generator, state: torch.Tensor) -> bytes | None:
    """Return what the getter returns after `state` is set; ``None`` if it is no state."""
    try:
        generator.set_state(state)
    except RuntimeError:
        return None
    found = generator.get_state()
    return ctypes.string_at(found.data_ptr(), found.nbytes)


def _image_after(generator: torch.Generator, state: torch.Tensor) -> bytes:
    generator.set_state(state)
    return _image_of_torchs(generator)


def _image_of_torchs(generator: torch.Generator) -> bytes:
    """Return the memory of torch's own object and what follows it. The system checks that the address exists."""
    if not _has_addresses() or torch.Generator.__basicsize__ < _POINTER_AT + _POINTER_BYTES:
        return b""
    address = int.from_bytes(ctypes.string_at(id(generator) + _POINTER_AT, _POINTER_BYTES), "little")
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), _MAX_BYTES, address)
    except (OSError, OverflowError):  # not on Linux, or no address
        return b""


def memory_of_python(generator: object) -> PythonMemory | None:
    """Return the memory of one of Python's generators; ``None`` if it can't be read, or is of another class."""
    found = _python_offsets()
    return PythonMemory(generator, *found) if found is not None and type(generator) is random.Random else None


def memory_of_numpy(generator: Any) -> NumpyMemory | None:
    """Return the memory of one of NumPy's, likewise. NumPy must be imported."""
    found, numpy_random = _numpy_offsets(), sys.modules["numpy.random"]
    if found is None or type(generator) is not numpy_random.RandomState:
        return None
    return NumpyMemory(generator, *found) if type(generator._bit_generator) is numpy_random.MT19937 else None


def memory_of_torch(generator: torch.Generator) -> TorchMemory | None:
    """Return the memory of one of torch's on the CPU; ``None`` if it can't be read."""
    found = _torch_parts()
    return None if found is None or _words_in(generator) is None else TorchMemory(generator, found)
