"""Records: the objects of a large list that are small, plain, and alike; recorded and compared together.

A data set of 100,000 annotations is 100,000 objects, and as many lists. None of them becomes a node of the graph before
it changes, or another object refers to it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.baseline import MANY_ITEMS, SMALL_BYTES, mark_of, same_items

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
