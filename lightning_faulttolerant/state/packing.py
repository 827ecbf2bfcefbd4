"""Generator states of Python, NumPy and torch as bytes of a fixed layout, and back.

Bytes rather than the libraries' own objects: tuples of 625 integers and NumPy arrays don't load with
``weights_only=True``, cost more to copy, and can't be compared cheaply.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state import memory
from lightning_faulttolerant.state.blobs import blob_to_tensor, tensor_to_blob

# 624 words and the position, then the cached second Gaussian of `random.gauss` (a flag and a double).
_PYTHON = struct.Struct("<625I?d")
_NUMPY_MT19937_TAIL = struct.Struct("<iid")
_PYTHON_VERSION = 3
# For a device's generator: its seed, and how many numbers it has drawn since.
_DEVICE = struct.Struct("<Qq")


def random_state(generator: Any) -> bytes:
    """Return the state of a Python generator, or of the ``random`` module's."""
    return memory.read_random(generator) or pack_random(generator.getstate())


def numpy_state(generator: Any) -> bytes:
    """Return the state of a NumPy ``RandomState``, its module's, or of a ``Generator``."""
    if hasattr(generator, "get_state"):
        return memory.read_random_state(generator) or pack_numpy(generator.get_state(legacy=False))
    return bits_state(generator.bit_generator)


def bits_state(bits: Any) -> bytes:
    """Return the state of a NumPy bit generator."""
    return memory.read_bit_generator(bits) or pack_numpy(bits.state)


def pack_random(state: tuple[Any, ...]) -> bytes:
    """Return the result of ``random.Random.getstate`` as bytes."""
    _, words, gauss = state
    return _PYTHON.pack(*words, gauss is not None, 0.0 if gauss is None else gauss)


def unpack_random(blob: bytes) -> tuple[Any, ...]:
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
