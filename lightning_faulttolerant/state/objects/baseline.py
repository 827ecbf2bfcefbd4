"""Marks: the content of an object at one instant, kept so that a later change is found.

A mark is shallow. The items of a container are compared by identity, leaves also by their value. Each item that can
change has its own mark.
"""

from __future__ import annotations

import hashlib
import marshal
import operator
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.tensors import bit_sums, shard_of

SMALL_BYTES = 65_536
_DATA_BYTES = 1 << 20
_NUM_SAMPLED = 256
MANY_ITEMS = 256
"""From this many items on, lists and dicts of plain data count as one object."""
_BY_VALUE = 2  # the version of marshal's format that depends on values alone

Mark = Callable[[], bool]
"""Returns whether the object is unchanged."""
_LARGE_BYTES = 1 << 20


class Weak(weakref.ref[Any]):
    """Stands for a large tensor or array: training may replace it, and then its memory is freed."""


def hold(value: object) -> object:
    """Return `value`, or a weak stand-in if it is large."""
    is_data = isinstance(value, Tensor) or kinds.is_numpy(value, "ndarray")
    return Weak(value) if is_data and is_large(value) else value


def held(value: object) -> object:
    """Return the value that `hold` was called with; ``None`` if it no longer exists."""
    return value() if type(value) is Weak else value


def is_large(value: Any) -> bool:
    """Return whether a tensor or array is held weakly."""
    return not (isinstance(value, Tensor) and not is_readable(value)) and bool(value.nbytes > _LARGE_BYTES)


def mark_of(value: Any) -> Mark | None:
    """Return a mark of `value`, or ``None`` if it has no content that can change."""
    if isinstance(value, Tensor):
        return _tensor_mark(value)
    if kinds.is_array(value):
        return _array_mark(value)
    if kinds.is_numpy(value, "ndarray"):
        return _items_mark(value, lambda array: array.ravel().tolist())
    if isinstance(value, dict):
        return _items_mark(value, _keys_and_values)
    if isinstance(value, set):
        copied = set(kinds.items_of(value))
        return lambda: set.__eq__(value, copied) is True
    if kinds.is_container(value):
        return _items_mark(value, kinds.items_of)
    if kinds.is_buffer(value):
        buffer = kinds.content_of_buffer(value)
        return lambda: kinds.content_of_buffer(value) == buffer
    if kinds.holds_data(value):
        return _data_mark(value)
    if kinds.is_hash(value):
        digest = value.digest()
        return lambda: bool(value.digest() == digest)
    if isinstance(value, types.CellType):
        return _items_mark(value, kinds.contents_of_cell)
    if kinds.is_shared_value(value):
        content = bytes(kinds.memory_of(value))
        return lambda: bytes(kinds.memory_of(value)) == content
    if kinds.is_generator(value):
        return _generator_mark(value)
    if kinds.is_loader_iterator(value):
        return _loader_iterator_mark(value)
    if kinds.is_iterator(value):
        return _iterator_mark(value)
    return None


def length_mark(value: object) -> Mark | None:
    """Return a mark of a container that finds added and removed items; ``None`` for anything else."""
    if not kinds.is_container(value):
        return None
    length = kinds.length_of(value)
    return lambda: kinds.length_of(value) == length


def sample_mark(value: Any) -> Mark:
    """Return a mark of a large tensor or array that reads only a few of its elements."""
    is_tensor = isinstance(value, Tensor)
    if (not is_readable(value)) if is_tensor else (kinds.is_mapped(value) or not value.flags.writeable):
        return mark_of(value) or (lambda: True)
    place, sample = _place(value) if is_tensor else None, _sample(value)
    return lambda: (place is None or _place(value) == place) and bool(_sample(value) == sample)


def _sample(value: Any) -> object:
    if not isinstance(value, Tensor):
        first = value.reshape(-1) if value.flags.c_contiguous else value[:1]
        return value.shape, value.dtype, first[:: max(1, len(first) // _NUM_SAMPLED)].tobytes()
    flat = shard_of(value).detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[:1].reshape(-1)
    return flat[:: max(1, flat.numel() // _NUM_SAMPLED)].contiguous().cpu().view(torch.uint8).numpy().tobytes()


def plain_data_mark(value: Any) -> Mark | None:
    """Return a mark of a large list or dict of Python's own lists and dicts; ``None`` for anything else.

    Such data are not separate objects: the annotations of a data set may be millions of lists.
    """
    if type(value) not in (list, dict) or len(value) < MANY_ITEMS:
        return None
    items = value.values() if isinstance(value, dict) else value
    if all(map(kinds.is_leaf_type, set(map(type, items)))):
        return None
    digest = _digest(value)
    return None if digest is None else lambda: _digest(value) == digest


def _digest(value: Any) -> bytes | None:
    try:
        return hashlib.blake2b(marshal.dumps(value, _BY_VALUE), digest_size=16).digest()
    except ValueError:  # it holds other objects
        return None


def same(one: object, other: object) -> bool:
    """Return whether two values are one object, or equal leaves; the second may be a result of `hold`."""
    if type(other) is Weak:
        return one is other()
    if one is other:
        return True
    if type(one) is not type(other) or not kinds.is_leaf(one):
        # A method is created again each time that it is looked up.
        return isinstance(one, types.MethodType) and one == other
    return bool(one == other) or (one != one and other != other)


def same_items(items: Iterable[object], others: Iterable[object]) -> bool:
    """Return whether two collections hold the same objects; at the speed of C if they do."""
    return all(map(operator.is_, items, others)) or all(map(same, items, others))


def items_mark(value: object, before: Any) -> Mark:
    """Return a mark of a list or dict that held the items of `before`."""
    if isinstance(value, dict):
        return _items_mark(value, _keys_and_values, _keys_and_values(before))
    return _items_mark(value, kinds.items_of, list(before))


def _keys_and_values(mapping: Any) -> list[object]:
    pairs = kinds.pairs_of(mapping)
    return [key for key, _ in pairs] + [child for _, child in pairs]


def _items_mark(value: object, items_of: Callable[[Any], list[object]], before: list[object] | None = None) -> Mark:
    copied = _held_weakly(items_of(value) if before is None else before)

    def is_same() -> bool:
        items = value if type(value) is list else items_of(value)
        return len(items) == len(copied) and same_items(items, copied)

    return is_same


def _data_mark(value: object) -> Mark | None:
    """Return a mark of a small table, or a similar object, by its pickle; ``None`` for a large one."""
    digest = _pickled(value)
    return None if digest is None else lambda: _pickled(value) == digest


def _pickled(value: object) -> bytes | None:
    if kinds.num_bytes(value) > _DATA_BYTES:
        return None
    try:
        return hashlib.blake2b(pickle.dumps(value), digest_size=16).digest()
    except Exception:  # noqa: BLE001 - the library may raise anything
        return None


def _held_weakly(items: list[object]) -> list[object]:
    may_be_large = any(issubclass(k, Tensor) or k.__module__ == "numpy" for k in set(map(type, items)))
    return list(map(hold, items)) if may_be_large else items


def _tensor_mark(tensor: Tensor) -> Mark:
    tensor_ref = weakref.ref(tensor)
    place = _place(tensor)
    content = _tensor_content(tensor) if is_readable(tensor) else None

    def is_same() -> bool:
        now = tensor_ref()
        if now is None:
            return True  # it no longer exists: there is nothing to carry
        if _place(now) != place:
            return False
        return content is None or _tensor_content(now) == content  # `x.data.mul_(2)` does not count as a version

    return is_same


def _tensor_content(tensor: Tensor) -> object:
    """Return a value that differs if the bits of two tensors differ."""
    shard = shard_of(tensor).detach()
    if shard.nbytes <= SMALL_BYTES and shard.device.type == "cpu":
        return hash(shard.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return bit_sums(tensor).tolist()


def _place(tensor: Tensor) -> tuple[object, ...]:
    grad = tensor.grad if tensor.is_leaf else None
    state = _version(tensor), tensor.requires_grad, None if grad is None else (id(grad), _version(grad))
    if not is_readable(tensor):
        return id(tensor), state
    return (shard_of(tensor).data_ptr(), tuple(tensor.shape), tensor.dtype), state


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def is_readable(tensor: Tensor) -> bool:
    """Return whether the elements of `tensor` can be compared: it is dense, has one shape, and its memory exists."""
    is_dense = tensor.layout is torch.strided and not tensor.is_nested
    return is_dense and not tensor.is_meta and not tensor.is_quantized and not _is_lazy(tensor) and _has_memory(tensor)


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its own memory. A subclass that wraps other tensors has none, as in torchao."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return True
    try:
        return shard_of(tensor).data_ptr() != 0 or tensor.numel() == 0
    except RuntimeError:  # torch's FakeTensor
        return False


def _is_lazy(tensor: Tensor) -> bool:
    return torch.nn.parameter.is_lazy(tensor)


def _array_mark(array: Any) -> Mark:
    if not array.flags.writeable or kinds.is_mapped(array):  # the content of a file is not state
        return lambda: True
    content, kept = _content(array), hold(array)

    def is_same() -> bool:
        now = held(kept)
        return now is None or bool(_content(now) == content)

    return is_same


def _content(array: Any) -> object:
    """Return a value that differs if the contents of two arrays differ; for a large one, the sums of its bits."""
    place = (array.shape, array.dtype)
    if array.nbytes <= SMALL_BYTES:
        return place, array.tobytes()
    flat = (array if array.flags.c_contiguous else array.copy(order="C")).reshape(-1).view("uint8")
    return place, bit_sums(torch.from_numpy(flat)).tolist()


def _generator_mark(generator: types.GeneratorType[Any, Any, Any]) -> Mark:
    place = _generator_place(generator)
    return lambda: _same_place(_generator_place(generator), place)


def _generator_place(generator: types.GeneratorType[Any, Any, Any]) -> tuple[int, Mapping[str, object]]:
    frame = generator.gi_frame
    return (-2, {}) if frame is None else (frame.f_lasti, dict(frame.f_locals))


def _same_place(one: tuple[int, Mapping[str, object]], other: tuple[int, Mapping[str, object]]) -> bool:
    if one[0] != other[0] or one[1].keys() != other[1].keys():
        return False
    return same_items(one[1].values(), other[1].values())


def _loader_iterator_mark(iterator: object) -> Mark:
    num_yielded = getattr(iterator, "_num_yielded", None)
    return lambda: getattr(iterator, "_num_yielded", None) == num_yielded


def _iterator_mark(iterator: object) -> Mark:
    place = _iterator_place(iterator)
    return lambda: place is not None and _iterator_place(iterator) == place


def _iterator_place(iterator: object) -> object:
    """Return the position of an iterator, as numbers; ``None`` if it does not report one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return _numbers_in(iterator.__reduce__()[1:])
    except TypeError:  # from Python 3.14 on, those of itertools report nothing
        text = repr(iterator)
        return None if " at 0x" in text else text


def _numbers_in(value: object) -> object:
    if isinstance(value, tuple):
        return tuple(map(_numbers_in, value))
    if kinds.is_iterator(value):
        return _iterator_place(value)
    if type(value) in (int, float):
        return value
    return operator.length_hint(value, -1) if type(value).__module__ in ("builtins", "itertools") else -1
