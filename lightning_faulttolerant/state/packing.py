"""Generator states as bytes, and the bytes of a whole state pooled in one tensor that a checkpoint can hold.

Generator states of Python, NumPy, and torch have a fixed layout. Tuples of 625 integers and NumPy arrays don't load
with ``weights_only=True``, cost more to copy, and can't be compared cheaply.

``torch.load(weights_only=True)`` refuses ``bytes`` but accepts a uint8 tensor. All bytes share one tensor, since each
tensor costs a record of 200 bytes in the file. The pool is compressed, since torch's state is half zeros and the states
of two moments are mostly alike. Of the states of many ranks, which are mostly alike, only the differences are kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import pickle
import struct
import types
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.memory import read_bit_generator, read_random, read_random_state

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
    elif isinstance(value, types.MethodType):  # of a live object, which may not be possible to pickle
        digest.update(b"m")
        _feed(digest, value.__qualname__)
    elif not isinstance(value, _PLAIN):  # an object, whose text may leave parts out
        text = pickle.dumps(value)
        digest.update(b"o%d" % len(text) + text)
    else:
        text = f"{type(value).__name__}{value!r}".encode()
        digest.update(b"v%d" % len(text) + text)
