"""Marks: the content of an object at one instant, kept so that a later change is found.

A mark is shallow. The items of a container are compared by identity, leaves also by their value. Each item that can
change has its own mark.

Records are the objects of a large list that are small, plain, and alike. They are recorded and compared together. A
data set of 100,000 annotations is 100,000 objects, and as many lists. None of them becomes a node of the graph before
it changes, or another object refers to it.
"""

from __future__ import annotations

import hashlib
import marshal
import operator
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.tensors import (
    SMALL_BYTES,
    array_content,
    bytes_of,
    is_readable,
    shard_of,
    tensor_mark,
    tensor_place,
)

_DATA_BYTES = 1 << 20
_NUM_SAMPLED = 256
MANY_ITEMS = 256
"""From this many items on, lists and dicts of plain data count as one object."""
_BY_VALUE = 2  # the version of marshal's format that depends on values alone

Mark = Callable[[], bool]
"""Returns whether the object is unchanged."""


class Weak(weakref.ref[Any]):
    """Stands for a large tensor or array: training may replace it, and then its memory is freed."""


def hold(value: Any) -> object:
    """Return `value`, or a weak stand-in if it is a large tensor or array."""
    try:
        is_data = is_readable(value) if issubclass(type(value), Tensor) else kinds.is_numpy(value, "ndarray")
        return Weak(value) if is_data and value.nbytes > _DATA_BYTES else value
    except Exception:  # noqa: BLE001 - any subclass may raise anything
        return value


def held(value: object) -> object:
    """Return the value that `hold` was called with; ``None`` if it no longer exists."""
    return value() if type(value) is Weak else value


def mark_of(value: Any) -> Mark | None:
    """Return a mark of `value`, or ``None`` if it has no content that can change."""
    if isinstance(value, Tensor):
        return tensor_mark(value)
    if kinds.is_array(value):
        return _array_mark(value)
    if kinds.is_numpy(value, "ndarray"):
        return _items_mark(value, lambda array: array.ravel().tolist())
    if isinstance(value, set):
        copied = set(kinds.items_of(value))
        return lambda: set.__eq__(value, copied) is True
    if kinds.is_container(value):
        return items_mark(value)
    if kinds.is_buffer(value):
        return _mark(value, kinds.content_of_buffer)
    if kinds.holds_data(value):
        return _data_mark(value)
    if kinds.is_hash(value):
        return _mark(value, lambda one: one.digest())
    if isinstance(value, types.CellType):
        return _items_mark(value, kinds.contents_of_cell)
    if kinds.is_shared_value(value):
        return _mark(value, lambda one: bytes(kinds.memory_of(one)))
    if kinds.is_generator(value):
        return _mark(value, _generator_place, _same_place)
    if kinds.is_loader_iterator(value):
        return _mark(value, lambda one: getattr(one, "_num_yielded", None))
    if kinds.is_iterator(value):
        return _mark(value, _iterator_place, lambda one, other: one is not None and one == other)
    return None


def _mark(value: Any, content_of: Callable[[Any], Any], are_same: Callable[[Any, Any], object] = operator.eq) -> Mark:
    """Return a mark that compares what a function returns for `value`."""
    before = content_of(value)
    return lambda: bool(are_same(content_of(value), before))


def length_mark(value: object) -> Mark | None:
    """Return a mark of a container that finds added and removed items; ``None`` for anything else."""
    return _mark(value, kinds.length_of) if kinds.is_container(value) else None


def sample_mark(value: Any) -> Mark:
    """Return a mark of a large tensor or array that reads only a few of its elements."""
    is_tensor = isinstance(value, Tensor)
    if (not is_readable(value)) if is_tensor else (kinds.is_mapped(value) or not value.flags.writeable):
        return mark_of(value) or (lambda: True)
    place, sample = tensor_place(value) if is_tensor else None, _sample(value)
    return lambda: (place is None or tensor_place(value) == place) and bool(_sample(value) == sample)


def _sample(value: Any) -> object:
    if not isinstance(value, Tensor):
        first = value.reshape(-1) if value.flags.c_contiguous else value[:1]
        return value.shape, value.dtype, first[:: max(1, len(first) // _NUM_SAMPLED)].tobytes()
    flat = shard_of(value).detach()
    flat = flat.view(-1) if flat.is_contiguous() else flat[:1].reshape(-1)
    return bytes_of(flat[:: max(1, flat.numel() // _NUM_SAMPLED)].cpu(), alignment=1).numpy().tobytes()


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
    try:
        return bool(one == other) or (one != one and other != other)
    except Exception:  # noqa: BLE001 - any class may raise anything
        return False


def same_items(items: Iterable[object], others: Iterable[object]) -> bool:
    """Return whether two collections hold the same objects; at the speed of C if they do."""
    return all(map(operator.is_, items, others)) or all(map(same, items, others))


def items_mark(value: object, before: Any = None) -> Mark:
    """Return a mark of a list, dict, or deque that held the items of `before`, or holds its own items."""
    if isinstance(value, dict):
        return _items_mark(value, _keys_and_values, None if before is None else _keys_and_values(before))
    return _items_mark(value, kinds.items_of, None if before is None else list(before))


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


def _array_mark(array: Any) -> Mark:
    if not array.flags.writeable or kinds.is_mapped(array):  # the content of a file is not state
        return lambda: True
    content, kept = array_content(array), hold(array)

    def is_same() -> bool:
        now = held(kept)
        return now is None or bool(array_content(now) == content)

    return is_same


def _generator_place(generator: types.GeneratorType[Any, Any, Any]) -> tuple[int, Mapping[str, object]]:
    frame = generator.gi_frame
    return (-2, {}) if frame is None else (frame.f_lasti, dict(frame.f_locals))


def _same_place(one: tuple[int, Mapping[str, object]], other: tuple[int, Mapping[str, object]]) -> bool:
    if one[0] != other[0] or one[1].keys() != other[1].keys():
        return False
    return same_items(one[1].values(), other[1].values())


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


_MAX_DEPTH = 6
_dict_of = operator.attrgetter("__dict__")


@dataclass(kw_only=True, slots=True)
class Layer:
    """The objects of one class.

    Args:
        kind: The class.
        members: The objects, each once.
        roots: The number of the record that each belongs to.
        before: The earlier content of each: a dict of its attributes or items, a tuple of its items, or a mark.
        places: The number of each, by its ``id``.
        flat: All values in `before`, in one list, and all names.
    """

    kind: type
    members: list[Any]
    roots: list[int]
    before: list[Any]
    places: dict[int, int]
    flat: tuple[list[object], list[object]] | None = None

    @property
    def is_marked(self) -> bool:
        """Whether each is compared by its own mark: arrays and tensors."""
        return not (self.kind in (list, tuple, dict) or self.has_attributes)

    @property
    def has_attributes(self) -> bool:
        """Whether these are objects of the user's classes."""
        return kinds.is_record_kind(self.kind)

    def contents(self) -> list[Any]:
        """Return the current content of each."""
        return list(map(_dict_of, self.members)) if self.has_attributes else self.members

    def changed(self) -> list[int]:
        """Return the numbers of the objects that have changed."""
        if self.kind is tuple:
            return []
        if self.is_marked:
            return [i for i, is_same in enumerate(self.before) if not is_same()]
        now = self.contents()
        if self._holds_same(now):
            return []
        changed, self.flat = [], None
        for i, (one, other) in enumerate(zip(now, self.before, strict=True)):
            if not _is_same(one, other):
                changed.append(i)
            elif other:  # an equal but different object is compared by identity from now on
                self.before[i] = dict(one) if isinstance(one, dict) else tuple(one)
        return changed

    def _holds_same(self, now: list[Any]) -> bool:
        """Return whether all hold the same objects as before, at the speed of C."""
        is_mapping = self.kind is not list
        if self.flat is None:
            names = list(chain.from_iterable(self.before)) if is_mapping else []
            values = map(dict.values, self.before) if is_mapping else self.before
            self.flat = list(chain.from_iterable(values)), names
        if not all(map(operator.eq, map(len, now), map(len, self.before))):
            return False
        values, names = self.flat
        found = map(dict.values, now) if is_mapping else now
        if not all(map(operator.is_, chain.from_iterable(found), values)):
            return False
        return not is_mapping or all(map(operator.is_, chain.from_iterable(now), names))

    def without(self, roots: set[int]) -> Layer:
        """Return a layer without the objects of some records."""
        stay = [root not in roots for root in self.roots]
        members, own, before = (list(compress(x, stay)) for x in (self.members, self.roots, self.before))
        places = dict(zip(map(id, members), range(len(members)), strict=True))
        return Layer(kind=self.kind, members=members, roots=own, before=before, places=places)


class Records:
    """The items of a large list, and their parts.

    Args:
        owner: The list or tuple.
        items: Its items at that time.
        layers: Its items and the objects that they refer to, by class.
    """

    def __init__(self, owner: Any, items: Sequence[object], layers: list[Layer]) -> None:
        self.owner, self.items, self.layers = owner, items, layers

    def suits(self, left_out: Callable[[Any], Iterable[str]], is_live: Callable[[object], bool]) -> bool:
        """Return whether the walk checks all of these under some rules."""
        for layer in self.layers:
            if layer.has_attributes:
                names = set(chain.from_iterable(layer.before))
                if is_live(layer.members[0]) or not names.isdisjoint(left_out(layer.members[0])):
                    return False
            elif any(map(is_live, layer.members if layer.is_marked else layer.members[:1])):
                return False
        return True

    def holds_same_items(self) -> bool:
        """Return whether the list holds the same objects as before."""
        return len(self.owner) == len(self.items) and all(map(operator.is_, self.owner, self.items))

    def changed(self) -> set[int]:
        """Return the numbers of the records that have changed."""
        return {layer.roots[i] for layer in self.layers for i in layer.changed()}

    def root_of(self, value: Any) -> int | None:
        """Return the number of the record that an object belongs to; ``None`` if it belongs to none of these."""
        found = self.place_of(value)
        return None if found is None else found[0].roots[found[1]]

    def place_of(self, value: Any) -> tuple[Layer, int] | None:
        """Return the layer of an object, and its number there."""
        for layer in self.layers:
            place = layer.places.get(id(value))
            if place is not None and layer.members[place] is value:
                return layer, place
        return None

    def members(self) -> Iterator[object]:
        """Yield all objects."""
        return chain.from_iterable(layer.members for layer in self.layers)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors."""
        return chain.from_iterable(layer.members for layer in self.layers if layer.kind is Tensor)

    def without(self, roots: set[int]) -> Records:
        """Return a copy without some records."""
        layers = [layer.without(roots) for layer in self.layers]
        return Records(self.owner, self.items, [layer for layer in layers if layer.members])


_noted: weakref.WeakValueDictionary[int, Records] = weakref.WeakValueDictionary()


def records_of(value: Any) -> Records | None:
    """Return the items of a large list or tuple as records; ``None`` if they are not alike, or hold other objects.

    Existing records of the same list are returned again if nothing has changed since: all callers share them.
    """
    if type(value) not in (list, tuple) or len(value) < MANY_ITEMS or len(set(map(type, value))) != 1:
        return None
    if not kinds.is_record_kind(type(value[0])):
        return None
    known = _noted.get(id(value))
    if known is not None and known.owner is value and known.holds_same_items() and not known.changed():
        return known
    layers = _layers_of(value)
    if layers is None:
        return None
    found = _noted[id(value)] = Records(value, tuple(value), layers)
    return found


def _layers_of(value: Sequence[object]) -> list[Layer] | None:
    """Return all objects that can be reached from the items of a list; ``None`` if one is not plain."""
    layers: list[Layer] = []
    level = [(list(value), list(range(len(value))))]
    seen: set[int] = set()
    for _ in range(_MAX_DEPTH):
        found = [layer for members, roots in level for layer in _by_kind(members, roots, seen) if layer.members]
        if not found:
            return layers
        if not all(map(_note, found)):
            return None
        layers += found
        level = [_children(layer) for layer in found if not layer.is_marked]
    return None


def _by_kind(members: list[object], roots: list[int], seen: set[int]) -> Iterator[Layer]:
    """Yield the objects that are not leaves and were not met yet, by class."""
    types = list(map(type, members))
    for kind in dict.fromkeys(types):
        if kinds.is_leaf_kind(kind):
            continue
        is_one = [one is kind for one in types]
        yield _once(kind, list(compress(members, is_one)), list(compress(roots, is_one)), seen)


def _once(kind: type, members: list[object], roots: list[int], seen: set[int]) -> Layer:
    places = dict(zip(map(id, members), range(len(members)), strict=True))
    if len(places) < len(members) or not seen.isdisjoint(places):
        first = {id(member): i for i, member in reversed([*enumerate(members)]) if id(member) not in seen}
        numbers = sorted(first.values())
        members, roots = [members[i] for i in numbers], [roots[i] for i in numbers]
        places = dict(zip(map(id, members), range(len(members)), strict=True))
    seen.update(places)
    return Layer(kind=kind, members=members, roots=roots, before=[], places=places)


def _note(layer: Layer) -> bool:
    """Record the content of a layer's members; return whether they can be checked together."""
    if layer.kind is tuple or layer.kind is list:
        layer.before = list(map(tuple, layer.members))
    elif layer.kind is dict or layer.has_attributes:
        layer.before = list(map(dict, layer.contents()))
        own = kinds.STATE_METHODS if layer.has_attributes else ()
        return not any(name in content for name in own for content in layer.before)
    elif (layer.kind is Tensor or layer.kind.__module__ == "numpy") and all(map(_is_small, layer.members)):
        layer.before = list(map(mark_of, layer.members))
    else:
        return False
    return True


def _is_small(value: Any) -> bool:
    return (isinstance(value, Tensor) or kinds.is_array(value)) and value.nbytes <= SMALL_BYTES


def _children(layer: Layer) -> tuple[list[object], list[int]]:
    contents = list(map(dict.values, layer.before)) if type(layer.before[0]) is dict else layer.before
    children = list(chain.from_iterable(contents))
    if all(map(kinds.is_leaf_kind, set(map(type, children)))):
        return [], []
    return children, [root for root, content in zip(layer.roots, contents, strict=True) for _ in content]


def _is_same(now: Any, before: Any) -> bool:
    if len(now) != len(before):
        return False
    if isinstance(now, dict):
        return list(now) == list(before) and same_items(now.values(), before.values())
    return same_items(now, before)
