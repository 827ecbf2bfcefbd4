"""Generator states as bytes, and the bytes of a whole state pooled in one tensor that a checkpoint can hold.

Generator states of Python, NumPy, and torch have a fixed layout. Tuples of 625 integers and NumPy arrays don't load
with ``weights_only=True``, cost more to copy, and can't be compared cheaply.

The states of Python's and NumPy's Mersenne Twisters are read directly from memory: 30 times as fast as their getters.
The position of a state in an object is not assumed. It is found once, with private generators, by comparison with the
getters. If it is not found, or for other types of generators, the getters are used. Only memory inside of the objects
is read.

``torch.load(weights_only=True)`` refuses ``bytes`` but accepts a uint8 tensor. All bytes share one tensor, since each
tensor costs a record of 200 bytes in the file. The pool is compressed, since torch's state is half zeros and the states
of two moments are mostly alike. Of the states of many ranks, which are mostly alike, only the differences are kept.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import pickle
import random
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

POOL = "blobs"
# A dict of this one key replaces the bytes. It holds their number in the pool.
_REFERENCE = "blob"
_LEVEL = 1  # within 2 percent of level 9: whatever isn't zeros or a repetition is random


def blob_to_tensor(blob: bytes) -> Tensor:
    """Return `blob` as a uint8 tensor of the same length."""
    if not blob:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(blob), dtype=torch.uint8)


def tensor_to_blob(tensor: Tensor) -> bytes:
    """Return the bytes of a contiguous CPU tensor.

    It reads by address: ``Tensor.numpy`` needs NumPy, which torch does not require, and ``tolist`` is 100 times
    slower.
    """
    tensor = tensor.detach().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def pack_blobs(state: Mapping[str, object]) -> dict[str, Any]:
    """Return a copy of `state` (dicts, lists, plain values, tensors) with all ``bytes`` moved under the key `POOL`.

    Raises:
        ValueError: If `state` uses a name that the copy needs.
    """
    if POOL in state:
        raise ValueError(f"A state can't have a part named {POOL!r}: its bytes are kept under that name.")
    numbers: dict[bytes, int] = {}
    packed: dict[str, object] = _pack(dict(state), numbers)
    data = zlib.compress(b"".join(numbers), _LEVEL)
    return {**packed, POOL: {"lengths": [len(blob) for blob in numbers], "data": blob_to_tensor(data)}}


def unpack_blobs(packed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `pack_blobs` turned into `packed`."""
    pool = packed[POOL]
    blobs = list(_split(zlib.decompress(tensor_to_blob(pool["data"])), pool["lengths"]))
    state: dict[str, object] = _unpack({name: part for name, part in packed.items() if name != POOL}, blobs)
    return state


def is_packed(state: dict[object, object]) -> bool:
    """Return whether a dict is a result of `pack_blobs`."""
    pool = dict.get(state, POOL)
    return type(pool) is dict and pool.keys() == {"lengths", "data"}


def _pack(state: object, numbers: dict[bytes, int]) -> Any:
    if isinstance(state, bytes):
        return {_REFERENCE: numbers.setdefault(state, len(numbers))}
    if isinstance(state, dict):
        if state.keys() == {_REFERENCE}:
            raise ValueError(f"A state can't hold a dict of the one key {_REFERENCE!r}: it would be taken for bytes.")
        return {key: _pack(value, numbers) for key, value in state.items()}
    if isinstance(state, list):
        return [_pack(value, numbers) for value in state]
    return state


def _unpack(state: object, blobs: list[bytes]) -> Any:
    if isinstance(state, dict):
        if state.keys() == {_REFERENCE}:
            return blobs[state[_REFERENCE]]
        return {key: _unpack(value, blobs) for key, value in state.items()}
    if isinstance(state, list):
        return [_unpack(value, blobs) for value in state]
    return state


def _split(data: bytes, lengths: list[int]) -> Iterator[bytes]:
    end = 0
    for length in lengths:
        begin, end = end, end + length
        yield data[begin:end]


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


# 624 words and the position, then the cached second Gaussian of `random.gauss` (a flag and a double).
_PYTHON = struct.Struct("<625I?d")
_NUMPY_MT19937_TAIL = struct.Struct("<iid")
_PYTHON_VERSION = 3
# For a device's generator: its seed, and how many numbers it has drawn since.
_DEVICE = struct.Struct("<Qq")


def random_state(generator: Any) -> bytes:
    """Return the state of a Python generator, or of the ``random`` module's."""
    return read_random(generator) or pack_random(generator.getstate())


def numpy_state(generator: Any) -> bytes:
    """Return the state of a NumPy ``RandomState``, its module's, or of a ``Generator``."""
    if hasattr(generator, "get_state"):
        return read_random_state(generator) or pack_numpy(generator.get_state(legacy=False))
    return bits_state(generator.bit_generator)


def bits_state(bits: Any) -> bytes:
    """Return the state of a NumPy bit generator."""
    return read_bit_generator(bits) or pack_numpy(bits.state)


def pack_random(state: tuple[Any, ...]) -> bytes:
    """Return the result of ``random.Random.getstate`` as bytes."""
    _, words, gauss = state
    return _PYTHON.pack(*words, gauss is not None, 0.0 if gauss is None else gauss)


def unpack_random(blob: bytes) -> tuple[object, ...]:
    """Return a state for ``random.Random.setstate``."""
    *words, has_gauss, gauss = _PYTHON.unpack(blob)
    return (_PYTHON_VERSION, tuple(words), gauss if has_gauss else None)


def pack_torch(state: Tensor) -> bytes:
    """Return the result of ``torch.Generator.get_state`` as bytes."""
    return tensor_to_blob(state)


def unpack_torch(blob: bytes) -> Tensor:
    """Return a state for ``torch.Generator.set_state``."""
    return blob_to_tensor(blob)


def has_drawn(blob: bytes) -> bool:
    """Return whether a device's generator with this state has drawn any numbers since it was seeded."""
    return len(blob) != _DEVICE.size or _DEVICE.unpack(blob)[1] != 0


def pack_numpy(state: dict[str, Any]) -> bytes:
    """Return a NumPy state (of a bit generator, or ``RandomState.get_state(legacy=False)``) as bytes."""
    if state["bit_generator"] == "MT19937":
        inner = state["state"]
        tail = _NUMPY_MT19937_TAIL.pack(inner["pos"], state.get("has_gauss", -1), state.get("gauss", 0.0))
        key: bytes = inner["key"].tobytes()
        return b"M" + key + tail
    return b"J" + json.dumps(state, default=_array_to_json).encode()


def unpack_numpy(blob: bytes) -> dict[str, Any]:
    """Return a state for ``BitGenerator.state`` or ``RandomState.set_state``."""
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    if blob[:1] == b"J":
        state: dict[str, object] = json.loads(blob[1:], object_hook=_array_from_json)
        return state
    key = np.frombuffer(blob[1 : 1 + 624 * 4], dtype=np.uint32).copy()
    pos, has_gauss, gauss = _NUMPY_MT19937_TAIL.unpack(blob[1 + 624 * 4 :])
    state = {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}}
    # -1: the state of a bare bit generator, which has no cached Gaussian.
    return state if has_gauss < 0 else {**state, "has_gauss": has_gauss, "gauss": gauss}


def _array_to_json(value: object) -> object:
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return {"dtype": str(value.dtype), "array": value.tolist()}
    raise TypeError(f"A generator's state holds a {type(value).__name__}, which can't be kept in a checkpoint.")


def _array_from_json(value: dict[str, Any]) -> object:
    import numpy as np  # noqa: PLC0415, RUF100 - as above

    return np.asarray(value["array"], dtype=value["dtype"]) if set(value) == {"dtype", "array"} else value


def empty_generator(kind: str) -> torch.Generator:
    """Return a torch generator on the device that `kind` (``torch:<device>``) names."""
    return torch.Generator(device=kind.partition(":")[2])


_DIGEST_BYTES = 16
_PLAIN = (type(None), bool, int, float, complex, str)
_KEYS, _OWN = "keys", "own"


def digests_of(state: object) -> object:
    """Return the dicts of `state` with a digest in place of every other value."""
    if isinstance(state, Mapping):
        return {key: digests_of(value) for key, value in state.items()}
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, state)
    return digest.digest()


def difference(state: Mapping[str, object], digests: Mapping[str, object]) -> dict[str, object]:
    """Return the input that `patched` needs to turn the state with `digests` into `state`.

    Args:
        state: A state.
        digests: The result of `digests_of` for another state.
    """
    own: dict[str, object] = {}
    for key, value in state.items():
        other = digests.get(key)
        if not isinstance(value, Mapping) or not isinstance(other, Mapping):
            if key not in digests or digests_of(value) != other:
                own[key] = [value]
        elif digests_of(value) != other:
            own[key] = difference(value, other)
    return {_KEYS: list(state), _OWN: own}


def patched(reference: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, object]:
    """Return the state that `difference` reduced to `delta`, relative to `reference`.

    A part that `reference` had then but lacks now is left out.
    """
    state = {}
    for key in delta[_KEYS]:
        if key not in delta[_OWN]:
            if key in reference:
                state[key] = reference[key]
            continue
        own = delta[_OWN][key]
        state[key] = own[0] if isinstance(own, list) else patched(reference.get(key, {}), own)
    return state


def _feed(digest: Any, value: object) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(tensor_to_blob(value.detach().cpu()))
    elif isinstance(value, Mapping):
        digest.update(f"d{len(value)}".encode())
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"l{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, bytes):
        digest.update(b"b%d" % len(value) + value)
    elif not isinstance(value, _PLAIN):  # an object, whose text may leave parts out
        text = pickle.dumps(value)
        digest.update(b"o%d" % len(text) + text)
    else:
        text = f"{type(value).__name__}{value!r}".encode()
        digest.update(b"v%d" % len(text) + text)
