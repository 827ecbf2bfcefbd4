"""Object state: the changes since one instant on all objects that can be reached from some roots.

A save carries the differences from the baseline. A resume leaves unchanged values alone, so users may edit their code
between two starts. Objects are restored in place, so every holder of an object sees the change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.baseline import held, same
from lightning_faulttolerant.state.objects.decoding import Decoder, NothingThereError, delete_attribute, set_attribute
from lightning_faulttolerant.state.objects.encoding import Encoder
from lightning_faulttolerant.state.objects.graph import Graph, Node, is_at, items_of
from lightning_faulttolerant.state.objects.leaves import CantCarryError, LiveError, OpaqueError, SavedError
from lightning_faulttolerant.state.objects.saved import (
    CONTENT,
    LOST,
    NODES,
    STATE,
    TABLE,
    contents_of,
    is_within,
    owners_in,
    parts_of,
    path_of_part,
)
from lightning_faulttolerant.state.objects.walk import Rules, Unchanged, attributes_of, graph_of
from lightning_faulttolerant.state.packing import digests_of
from lightning_faulttolerant.state.reachable import answers, is_a
from lightning_faulttolerant.state.tensors import is_readable

_MISSING = object()
_FIXED: tuple[Any, ...] = (tuple, frozenset)  # opaque only if one of their items is
_NONE: frozenset[str] = frozenset()
_MANY_ITEMS = 1_000


class ObjectState:
    """The changes on objects since this was created.

    Args:
        roots: The objects to begin with, by a name that begins their paths.
        rules: What is left out.
    """

    def __init__(self, roots: Mapping[str, Any], rules: Rules = Rules()) -> None:  # noqa: B008 - it is frozen
        self._rules = rules
        self._graph = graph_of(roots, rules, self._mark_of_state)
        self._always: dict[str, set[str]] = {}
        self.keeps_bytes = False
        """Whether `state_dict` may keep objects that only their library can read as bytes."""
        self.live: dict[str, str] = {}
        """Objects that the last `state_dict` left out because they are not state, by path: files, locks, bars."""

    def __len__(self) -> int:
        return len(self._graph.nodes)

    def add(self, roots: Mapping[str, object]) -> None:
        """Track more objects from now on; those that are already known keep their baseline.

        If the name of one of `roots` stood for another object before, that object is forgotten.
        """
        dropped: dict[int, Node] = {}
        for name, value in roots.items():
            if name in self._graph.things and held(self._graph.things[name]) is not value:
                dropped.update(self._graph.forget(name))
        graph_of(roots, self._rules, self._mark_of_state, graph=self._graph)
        for node in dropped.values():
            path = self._graph.path_of(node.value)
            if path is not None and self._graph.node_at(path) is not None:
                self._graph.nodes[path] = node  # the baseline is still that of the start

    def share(self, older: ObjectState) -> None:
        """Use the baselines of `older` for the objects that it knows too."""
        self._graph.share(older._graph)

    @property
    def changed(self) -> dict[str, set[str]]:
        """The objects that differ from their baseline, by path, each with its changed parts (see `_parts_changed`)."""
        self._graph.expand_changed()
        return self.changed_of(self._graph.nodes)

    def changed_of(self, paths: Iterable[str]) -> dict[str, set[str]]:
        """Return `changed` for only some objects."""
        found = ((path, self._parts_changed(self._graph.nodes[path])) for path in paths)
        return {path: parts for path, parts in found if parts}

    def containers_changed(self, paths: Iterable[str]) -> dict[str, Any]:
        """Return the lists and dicts that have changed or are new on these objects, by path as in ``lost``."""
        found: dict[str, Any] = {}
        for path, parts in self.changed_of(paths).items():
            value = self._graph.nodes[path].value
            now = {CONTENT: value, **kinds.attributes(value)}
            found.update({path_of_part(path, part): now[part] for part in parts & now.keys()})
        return {path: value for path, value in found.items() if isinstance(value, (list, dict))}

    def unchanged(self, paths: Iterable[str]) -> Unchanged:
        """Return some objects that have not changed yet, for frequent checks."""
        nodes = {path: self._graph.nodes[path] for path in paths}
        return Unchanged(nodes, lambda node: bool(self._parts_changed(node)))

    def carry(self, changed: Mapping[str, set[str]], *, without: Iterable[object] = ()) -> None:
        """Always carry these parts, even when they stop changing: the result of `changed` from another baseline.

        Args:
            changed: The parts.
            without: Objects that a checkpoint can't carry. An attribute that has one of them is as it was made.
        """
        ids = {id(one) for one in without}
        for path, parts in changed.items():
            now = kinds.attributes(self._graph.nodes[path].value) if ids and path in self._graph.nodes else {}
            kept = {part for part in parts if part not in now or id(now[part]) not in ids}
            self._always.setdefault(path, set()).update(kept)

    def carry_copies(self, tensors: Iterable[Tensor], *, replaced: bool = False) -> None:
        """Carry the tensors that are copies of one of `tensors`, even if they never change.

        Code that copies the weights when a run starts would copy other weights in a resumed one. A tensor with equal
        elements may be a constant that equals the weights of a norm: it counts if its holder has other copies.

        If the elements of `tensors` may have been replaced since they were copied, as DDP does on all ranks but the
        first, each tensor of the same form that the module holds is carried. Those of an optimizer always are: a hook
        at the start may have loaded other weights.
        """
        originals, copies = dict[object, list[Tensor]](), dict[str, Tensor]()
        for tensor in tensors:
            originals.setdefault(_form(tensor), []).append(tensor)
        self._graph.expand_tensors(lambda tensor: _form(tensor) in originals)
        for path, node in self._graph.nodes.items():
            own, is_of_optimizer = node.value, is_at(path, "optimizers")
            is_searched = isinstance(own, Tensor) and (is_of_optimizer or not replaced or is_at(path, "module"))
            known = originals.get(_form(own), ()) if is_searched else ()
            if any(_is_copy(own, one, replaced or is_of_optimizer) for one in known):
                copies[path] = own
        holders = {_holder_of(path) for path, tensor in copies.items() if not is_constant(tensor)}
        self.carry({path: {CONTENT} for path in copies if _holder_of(path) in holders})

    def contents_at(self, values: Iterable[object]) -> dict[str, set[str]]:
        """Return the contents of those of these values that can change in place, in the form of `changed`."""
        paths = (self._graph.path_of(value) for value in values)
        return {path: {CONTENT} for path in paths if path in self._graph.nodes and self._graph.nodes[path].mark}

    def contents(self, parts: Mapping[str, set[str]]) -> dict[str, object]:
        """Return the current content of these parts, by path."""
        return contents_of(self._state_of(parts))

    @property
    def paths(self) -> list[str]:
        """The paths of all objects that can change, the nearest first."""
        return list(self._graph.nodes)

    def not_known(self, roots: Mapping[str, object]) -> tuple[list[object], list[object]]:
        """Return the objects that did not exist at the baseline: those that can be carried, and the opaque ones."""
        now = graph_of(roots, self._rules, self._mark_of_state, with_contents=False)
        searched = [node.value for node in now.nodes.values()] + list(now.recorded(self._graph))
        found = {id(value): value for value in (*searched, *map(held, now.things.values()))}
        fixed = {key: {*map(id, own.__iter__(one))} for key, one in found.items() for own in _FIXED if is_a(one, own)}
        opaque = found.keys() - set(map(id, searched)) - fixed.keys()
        while more := {key for key, items in fixed.items() if not opaque.isdisjoint(items)} - opaque:
            opaque |= more
        new = {key: one for key, one in found.items() if not self._graph.is_met(one)}
        return [new[key] for key in new if key not in opaque], [new[key] for key in new if key in opaque]

    def forget(self, values: Iterable[object]) -> None:
        """Treat objects as new: a value that refers to one carries it whole."""
        for value in values:
            self._graph.forget_one(value)

    def things_of(self, is_one: Callable[[Any], bool]) -> dict[str, object]:
        """Return the objects that satisfy `is_one`, by path, including objects that are not searched."""
        found = ((path, held(value)) for path, value in self._graph.things.items())
        return {path: value for path, value in found if answers(is_one, value)}

    def carry_tensors(self) -> None:
        """Carry all tensors, even if they never change."""
        self._graph.expand_tensors(lambda tensor: True)
        tensors = (path for path, node in self._graph.nodes.items() if isinstance(node.value, Tensor))
        self.carry({path: {CONTENT} for path in tensors})

    def carry_buffers(self) -> None:
        """Carry the contents of what training may fill, even if they never change: deques, and all but large objects.

        A script may fill a buffer before the first start, and differently before each later one.
        """
        marked = (path for path, node in self._graph.nodes.items() if node.mark and _may_be_filled(node.value))
        self.carry({path: {CONTENT} for path in marked})

    def is_large(self, path: str) -> bool:
        """Return whether checking an object takes long: a container of many items, a large array."""
        value = self._graph.nodes[path].value
        return kinds.num_items(value) > _MANY_ITEMS

    def state_dict(
        self, *, of: Iterable[str] | None = None, without: Collection[str] = (), max_bytes: float = math.inf
    ) -> dict[str, Any]:
        """Return the changes, as plain values and copies.

        Args:
            of: The paths of the objects to check; ``None`` for all.
            without: The paths of objects and attributes that are left out.
            max_bytes: About how many bytes of new objects may be carried; an object with more is lost.

        Returns:
            ``nodes``, the changes of each object, by path; ``table``, the objects that did not exist before; and
            ``lost``, the reasons why changes can't be carried, by path. All three are empty if nothing has changed.
        """
        if of is None:
            self._graph.expand_changed()
        paths = list(self._graph.nodes if of is None else of)
        always = {path: self._always.get(path, _NONE) for path in paths}
        self.live = {}
        return self._state_of(always, without=without, max_bytes=max_bytes)

    def _state_of(
        self,
        always: Mapping[str, Collection[str]],
        *,
        without: Collection[str] = (),
        max_bytes: float = math.inf,
        has_plain: bool = True,
    ) -> dict[str, object]:
        """Return the changes of these objects, and the `always` parts of each."""
        encoder = Encoder(self._graph, max_bytes=max_bytes, has_plain=has_plain, keeps_bytes=self.keeps_bytes)
        nodes: dict[str, object] = {}
        lost: dict[str, str] = {}
        for path, parts in always.items():
            node = self._graph.nodes[path]
            found = self._encoded(path, node, encoder, lost, always=parts, without=without)
            if found:
                nodes[path] = found
            if CONTENT in found and _may_be_filled(node.value):
                for inner, parts in self._elements_of(path, node.value).items():
                    nodes[inner] = self._encoded(inner, self._graph.nodes[inner], encoder, lost, always=parts)
        if lost:  # what an object's own `state_dict` leaves out may be no state
            owners = {path for path, node in self._graph.nodes.items() if node.state is not None}
            lost = {path: why for path, why in lost.items() if path in owners or not is_within(path, owners)}
        if encoder.is_torn:
            return self._state_of(always, without=without, max_bytes=max_bytes, has_plain=False)
        return {NODES: nodes, TABLE: encoder.table, LOST: lost}

    def _elements_of(self, path: str, container: object) -> dict[str, set[str]]:
        """Return all parts of what a container held at the baseline and still holds, by path.

        A script may fill a buffer before the first start, and differently before each later one.
        """
        found: dict[str, set[str]] = {}
        queue = [child for _, child in items_of(path, container)]
        while queue:
            value = queue.pop()
            known = self._graph.path_of(value)
            if known is None or known in found or not is_at(known, path):  # it is new, or other objects hold it, too
                continue
            node = self._graph.node_at(known)
            queue += [child for _, child in items_of(known, value)]
            if node is not None:
                attributes = kinds.attributes(value) if node.attributes is not None else {}
                queue += attributes.values()
                found[known] = {*attributes, *([STATE] if node.state is not None else [CONTENT] if node.mark else [])}
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the state that `state_dict` returned.

        Returns:
            A line for each object or attribute that could not be restored.
        """
        decoder = Decoder(self._graph, state[TABLE])
        missing: list[str] = []
        owners = owners_in(state[NODES])
        # Objects with a `state_dict` may refer to the others. What that leaves out comes last.
        turns = {path: 1 if path in owners else 2 * is_within(path, owners) for path in state[NODES]}
        for path, content in sorted(state[NODES].items(), key=lambda item: turns[item[0]]):
            node = self._graph.node_at(path)
            if node is None:
                missing.append(f"{path}: it no longer exists")
                continue
            if turns[path] > 1 and self._parts_changed(node):
                continue  # its owner has restored it
            missing += [f"{path}{line}" for line in self._restore(node, content, decoder)]
        for weak in (node.value for node in self._graph.nodes.values() if type(node.value) in kinds.WEAK):
            items = list(weak) if isinstance(weak, kinds.WEAK[-1]) else dict(weak)
            weak.clear()
            weak.update(items)  # with references that notice the end of their objects
        return missing

    @contextmanager
    def attributes_kept(self) -> Iterator[None]:
        """Put back, after the block, the attributes that it has set to other objects."""
        kept = [(node.value, kinds.attributes(node.value)) for node in self._graph.nodes.values()]
        try:
            yield
        finally:
            for value, before in kept:
                now = kinds.attributes(value)
                for name in now.keys() - before.keys():
                    delete_attribute(value, name)
                for name in (name for name, one in before.items() if now.get(name, _MISSING) is not one):
                    set_attribute(value, name, before[name])

    def values_of(self, state: Mapping[str, Any]) -> dict[str, object]:
        """Return a state with the objects and attributes of `state`, and their current values."""
        always = {path: parts_of(content) for path, content in state[NODES].items() if self._graph.node_at(path)}
        return self._state_of(always)

    def _parts_changed(self, node: Node) -> set[str]:
        """Return the names of the attributes that changed, and `STATE` or `CONTENT`."""
        try:
            content = {CONTENT} if node.mark is not None and not node.mark() else set()
            state = {STATE} if node.state is not None and self._mark_of_state(node.value) != node.state else set()
            return content | state | self._attributes_changed(node)
        except Exception:  # noqa: BLE001 - it can't be read any more, and carrying it says why
            return {CONTENT}

    def _attributes_changed(self, node: Node) -> set[str]:
        if node.attributes is None or node.has_same_dict():
            return set()
        before, now = node.attributes, attributes_of(node.value, self._rules) or {}
        changed = {name for name, value in now.items() if not same(value, before.get(name, _MISSING))}
        return changed | (before.keys() - now.keys())

    def _encoded(
        self,
        path: str,
        node: Node,
        encoder: Encoder,
        lost: dict[str, str],
        *,
        always: Collection[str],
        without: Collection[str] = (),
    ) -> dict[str, object]:
        changed = self._parts_changed(node) | set(always)
        if without:
            changed = {part for part in changed if path_of_part(path, part) not in without}
        found: dict[str, object] = {}
        drops = self._rules.drops_saved
        if not changed or node.value is None:
            return found
        changed |= {STATE} if node.state is not None else set()
        if STATE in changed:
            with _noted(lost, path, drops):
                found[STATE] = encoder.state(node.value.state_dict())
            if path in lost:
                return found
        if CONTENT in changed:
            with _noted(lost, path, drops):
                found[CONTENT] = encoder.content(node.value)
        now = kinds.attributes(node.value)
        attributes = []
        for name in sorted(changed - {STATE, CONTENT}):
            if name in now:
                encoder.may_be_handle = _may_be_handle(node, name)
                with _noted(lost, f"{path}.{name}", drops, live=self.live, may_be_handle=encoder.may_be_handle):
                    attributes.append([name, encoder.encode(now[name])])
        gone = sorted(changed - {STATE, CONTENT} - now.keys())
        return {**found, **({"attributes": attributes} if attributes else {}), **({"gone": gone} if gone else {})}

    def _restore(self, node: Node, content: Mapping[str, Any], decoder: Decoder) -> list[str]:
        missing: list[str] = []
        before = kinds.attributes(node.value) if STATE in content else {}
        with _missed(missing, ""):
            if STATE in content:
                node.value.load_state_dict(decoder.decode(content[STATE]))
            if CONTENT in content:
                decoder.fill(node.value, content[CONTENT])
        now = kinds.attributes(node.value) if before else {}
        loaded = {name for name, value in before.items() if now.get(name, _MISSING) is not value}
        own_state = self._mark_of_state(node.value) if before and "attributes" in content else None
        for name, encoded in content.get("attributes", ()):
            if name in loaded:
                continue
            with _missed(missing, f".{name}"):
                value = decoder.decode(encoded)
                if not same(value, kinds.attributes(node.value).get(name, _MISSING)):
                    set_attribute(node.value, name, value)
        for name in content.get("gone", ()):
            delete_attribute(node.value, name)
        if own_state is not None and self._mark_of_state(node.value) != own_state:
            for name, value in now.items():  # its state counts on what `load_state_dict` has left
                set_attribute(node.value, name, value)
        return missing

    def _mark_of_state(self, value: Any) -> object:
        """Return a digest of the ``state_dict`` of an object, or ``None`` if that can't be carried."""
        try:
            return digest_of_value(value.state_dict())
        except Exception:  # noqa: BLE001 - a user's own code; the object's attributes are compared instead
            return None


def digest_of_value(value: object) -> object:
    """Return a digest of everything that a value consists of.

    Raises:
        CantCarryError: If it can't be carried.
    """
    encoder = Encoder(Graph())
    encoded = encoder.state(value)
    return digests_of({"state": encoded, "table": encoder.table})


def _form(tensor: Tensor) -> object:
    return tuple(tensor.shape) if is_readable(tensor) else None, tensor.dtype, tensor.device


def _is_copy(tensor: Tensor, original: Tensor, replaced: bool) -> bool:
    is_plain = all(type(one) in (Tensor, torch.nn.Parameter) and is_readable(one) for one in (tensor, original))
    return is_plain and tensor is not original and (replaced or torch.equal(tensor, original))


def is_constant(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor are equal."""
    flat = tensor.detach().reshape(-1)
    return not flat.numel() or bool((flat == flat[0]).all())


def _may_be_filled(value: Any) -> bool:
    return isinstance(value, deque) or kinds.num_items(value) <= _MANY_ITEMS


def is_no_data(value: object) -> bool:
    """Return whether an object is a tensor or a container with few items."""
    return (kinds.is_container(value) or isinstance(value, Tensor)) and kinds.num_items(value) <= _MANY_ITEMS


def _holder_of(path: str) -> str:
    return path[: max(path.rfind("."), path.rfind("["))]


def _may_be_handle(node: Node, name: str) -> bool:
    """Return whether a library's own object may be a handle that a data set has opened for reading."""
    was_nothing = node.attributes is not None and node.attributes.get(name) is None
    return was_nothing and isinstance(node.value, torch.utils.data.Dataset)


@contextmanager
def _noted(
    lost: dict[str, str], path: str, drops_saved: bool, *, live: Any = None, may_be_handle: bool = False
) -> Iterator[None]:
    """Record why a value can't be carried: `CantCarryError`, or an error of the user's own code."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any class may raise anything
        is_handle = isinstance(error, LiveError) or (may_be_handle and isinstance(error, OpaqueError))
        if is_handle and (drops_saved or not isinstance(error, SavedError)):
            lost = {} if live is None else live  # opened, or opened again: not state
        lost[path] = str(error) if isinstance(error, CantCarryError) else f"{type(error).__name__}: {error}"


@contextmanager
def _missed(missing: list[str], name: str) -> Iterator[None]:
    """Record why a value can't be restored: an error in the user's code, or in a damaged state."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any class may raise anything
        reason = str(error) if isinstance(error, NothingThereError) else f"{type(error).__name__}: {error}"
        missing.append(f"{name}: {reason}")
