"""Walks over all that can be reached from some roots, and records each object that can change by one path.

The user's own modules are such roots: those whose files belong neither to Python nor to an installed package. Globals
that do not belong to a module count as one too: those of running functions, and of the classes of given objects. See
`is_detached`.

Objects that have not changed yet are compared all together. A worker checks its objects after each batch, so a check
must cost next to nothing while nothing changes.
"""

from __future__ import annotations

import gc
import logging
import math
import operator
import sys
import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, count, repeat
from typing import Any

from torch import Tensor, nn

from lightning_faulttolerant.state.memory import ids_in
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.baseline import (
    MANY_ITEMS,
    Mark,
    hold,
    length_mark,
    mark_of,
    plain_data_mark,
    records_of,
    sample_mark,
)
from lightning_faulttolerant.state.objects.graph import (
    Graph,
    Node,
    items_of,
    name_of,
    of_function,
    of_hooks,
    of_module,
    of_namespace,
)
from lightning_faulttolerant.state.reachable import (
    answers,
    global_path,
    has_dict,
    is_detached,
    is_detached_class,
    is_generator,
    is_librarys,
    is_users,
    is_users_function,
    is_users_module,
    slots_of,
)
from lightning_faulttolerant.state.tensors import SMALL_BYTES, is_readable

_FIRST_COPY = 2


class Detached:
    """An object with the globals of a function, or another dict, as its attributes: the same dict.

    Args:
        variables: The globals.
    """

    def __init__(self, variables: dict[str, object]) -> None:
        self.__dict__ = variables


def users_namespaces(roots: Mapping[str, object]) -> dict[str, kinds.Namespace]:
    """Return the globals of the user's modules, and the attributes of the classes defined there, by name.

    Args:
        roots: Objects whose classes may have globals without a module, or mappings and sequences of such objects.
    """
    found: dict[str, kinds.Namespace] = {}
    for name, module in _with_detached(_users_modules(), roots):
        found[global_path(name)] = kinds.Namespace(owner=module)
        for kind in _classes_of(module):
            found[global_path(name, kind.__qualname__)] = kinds.Namespace(owner=kind)
    return found


def _classes_of(module: object) -> list[type]:
    """Return the classes that are defined in a module."""
    own_name = vars(module).get("__name__")

    def is_own(value: Any) -> bool:
        return isinstance(value, type) and value.__module__ == own_name and not kinds.is_file_system(value)

    return [value for value in list(vars(module).values()) if answers(is_own, value)]


def users_variables(roots: Mapping[str, object]) -> dict[str, object]:
    """Return the same as direct mappings of names to values."""
    return {name: vars(namespace.owner) for name, namespace in users_namespaces(roots).items()}


def _with_detached(
    modules: list[tuple[str, types.ModuleType]], roots: Mapping[str, object]
) -> Iterator[tuple[str, object]]:
    """Yield modules, and globals that do not belong to a module."""
    # A file that `importlib` has loaded by its path need not be in `sys.modules`. Other classes of modules may import
    # theirs when they are read.
    held = (one for _, module in modules for one in list(vars(module).values()) if type(one) is types.ModuleType)
    others = {one.__name__: one for one in held if one.__name__ not in sys.modules and is_users_module(one)}
    names = {name for name, _ in modules} | others.keys()
    yield from (*modules, *others.items())
    found = {id(variables): variables for variables in (*_of_frames(), *_of_classes(roots)) if is_detached(variables)}
    for variables in found.values():
        own = str(variables.get("__name__"))
        copies = (f"{own}~{number}" for number in count(_FIRST_COPY))
        name = next(name for name in chain([own], copies) if name not in names)
        names.add(name)
        yield name, Detached(variables)


def _of_frames() -> list[dict[str, object]]:
    """Return the globals of the running functions, the outermost first."""
    frame: types.FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        found.append(frame.f_globals)
        frame = frame.f_back
    return found[::-1]


def _of_classes(roots: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """Yield the globals of the functions of some objects' classes."""
    for root in roots.values():
        parts = root.values() if isinstance(root, Mapping) else root if isinstance(root, (list, tuple)) else [root]
        for part in parts:
            functions = [part, *(each for kind in type(part).__mro__ for each in vars(kind).values())]
            yield from (each.__globals__ for each in functions if isinstance(each, types.FunctionType))


_found: tuple[int, object, list[tuple[str, types.ModuleType]]] = (0, None, [])
_whose: dict[str, tuple[Any, bool]] = {}
"""For each name in `sys.modules`, its module and whether that is the user's."""


def _users_modules() -> list[tuple[str, types.ModuleType]]:
    """Return the user's modules; there are thousands of modules, so each is only checked once."""
    global _found, _whose
    num_modules, main = len(sys.modules), sys.modules.get("__main__")
    if _found[0] != num_modules or _found[1] is not main:
        _whose = {name: _looked_at(name, module) for name, module in list(sys.modules.items())}
        _found = (num_modules, main, list(_search()))
    return _found[2]


def _looked_at(name: str, module: object) -> tuple[object, bool]:
    known = _whose.get(name)
    if known is not None and known[0] is module:
        return known
    return module, isinstance(module, types.ModuleType) and is_users_module(module)


def _search() -> Iterator[tuple[str, types.ModuleType]]:
    seen: set[int] = set()
    main, is_mains = _whose.get("__main__", (None, False))
    for name, (module, is_own) in _whose.items():
        if name == "__mp_main__" and main is not module and is_mains:
            continue  # the main module before it was replaced (by runpy, a debugger)
        if is_own and id(module) not in seen:
            seen.add(id(module))
            yield "__main__" if name == "__mp_main__" else name, module


_log = logging.getLogger(__name__)

MAX_OBJECTS = 500_000
_MAX_PATH = 20_000  # the paths of a long chain take memory that grows with the square of its length
_NOTHING: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What the walk leaves out, because other code carries it.

    Args:
        left_out: Returns the names of an object's attributes that are not the user's.
        is_live: Returns whether an object is only known by its path, and not searched.
        goes_by_attributes: Returns whether the attributes of an object are its state although it has a ``state_dict``.
        drops_saved: Whether a variable with a state from this package is skipped, rather than reported. A loader's
            state would otherwise hold it together with all states before it.
        max_items: A container with more items is only compared by its length, a large array by a few elements.
    """

    left_out: Callable[[object], Collection[str]] = lambda value: _NOTHING
    is_live: Callable[[object], bool] = lambda value: False
    goes_by_attributes: Callable[[object], bool] = lambda value: False
    drops_saved: bool = False
    max_items: float = math.inf


def graph_of(
    roots: Mapping[str, object],
    rules: Rules,
    state_of: Callable[[object], object],
    *,
    graph: Graph | None = None,
    with_contents: bool = True,
) -> Graph:
    """Return the graph of all objects that can be reached from `roots`.

    Args:
        roots: The objects to begin with, by name.
        rules: What is left out.
        state_of: Returns a digest of the ``state_dict`` of an object that has one; ``None`` if it can't be read.
        graph: An existing graph to extend.
        with_contents: Whether changes of tensors and arrays must be found later. All of them are read now for this.
    """
    graph = Graph() if graph is None else graph
    queue: deque[tuple[str, object]] = deque(roots.items())
    while queue:
        path, value = queue.popleft()
        if answers(kinds.is_leaf, value) or graph.is_met(value):
            continue
        if len(path) > _MAX_PATH:
            _log.warning("What training changes on objects inside %s... is not saved: they are too deep.", path[:60])
            continue
        if len(graph.things) >= MAX_OBJECTS:
            _log.warning(
                "More than %s objects can be reached from the module, the callbacks, and the data sets: what training "
                "changes on objects after %s is not saved.",
                MAX_OBJECTS,
                path,
            )
            break
        graph.paths[id(value)] = path
        graph.things[path] = hold(value)
        try:
            if not kinds.is_named(value) or isinstance(value, types.MethodType):
                queue.extend([*_met(graph, path, value, rules, state_of, with_contents=with_contents)])
            else:
                queue.extend([*_named(graph, path, value)])
        except Exception as error:  # noqa: BLE001 - any class may raise anything: what can't be read is left alone
            graph.nodes.pop(path, None)
            _log.debug("%s can't be read (%s)", path, type(error).__name__)
    return graph


def _named(graph: Graph, path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the objects that a user's function or class refers to."""
    if isinstance(value, types.FunctionType) and is_users_function(value):
        yield from _of_function(graph, path, value)
    elif isinstance(value, type) and is_users(value) and not kinds.is_file_system(value):
        if is_detached_class(value):  # it can't be found by its name
            graph.classes.setdefault(name_of(value), value)
        yield from _of_class(graph, value)


def _met(
    graph: Graph, path: str, value: object, rules: Rules, state_of: Callable[[object], object], *, with_contents: bool
) -> Iterator[tuple[str, object]]:
    """Add `value` to the nodes, if it can change, and yield the objects that it refers to."""
    if kinds.is_stand_in(value):
        return
    graph.classes.setdefault(name_of(type(value)), type(value))
    if isinstance(value, (Tensor, nn.Module)) or kinds.is_optimizer(value):
        yield from of_hooks(path, value)
    if is_generator(value) or rules.is_live(value):
        return
    if isinstance(value, kinds.Namespace):
        yield from of_namespace(path, value)
    elif is_users(type(value)):
        yield f"{path}.__class__", type(value)
    state = None
    if is_carried_by_state(value) and not rules.goes_by_attributes(value):
        state = state_of(value)
        if state is not None and not is_users(type(value)):
            graph.nodes[path] = Node(kept=value, state=state)
            return
    if isinstance(value, Tensor) or kinds.is_array(value):
        mark = _content_mark(value, rules) if with_contents else lambda: True
    else:
        mark = length_mark(value) if kinds.num_items(value) > rules.max_items else plain_data_mark(value)
    if mark is not None:
        graph.nodes[path] = Node(kept=hold(value), mark=mark)
        return
    is_in_worker = rules.max_items < math.inf
    mark = None if is_in_worker and kinds.holds_data(value) else mark_of(value)
    own = attributes_of(value, rules)
    if mark is not None or own is not None:
        raw = _raw_of(value) if own is not None else None
        graph.nodes[path] = Node(kept=value, mark=mark, attributes=_held_weakly(own), state=state, raw=raw)
    for name, child in (own or {}).items():
        yield f"{path}.{name}", child
    if isinstance(value, nn.Module):
        yield from of_module(path, value)
    elif not _has_records(graph, path, value, rules):
        yield from items_of(path, value)


def _content_mark(value: Any, rules: Rules) -> Mark | None:
    has_bytes = not isinstance(value, Tensor) or is_readable(value)  # a sparse one has no such attribute
    is_sampled = rules.max_items < math.inf and has_bytes and value.nbytes > SMALL_BYTES
    return sample_mark(value) if is_sampled else mark_of(value)


def _held_weakly(attributes: dict[str, object] | None) -> dict[str, object] | None:
    return None if attributes is None else {name: hold(value) for name, value in attributes.items()}


def _has_records(graph: Graph, path: str, value: object, rules: Rules) -> bool:
    """Record the items of a large list together if they are alike; return whether they are."""
    found = None if rules.max_items < math.inf else records_of(value)
    if found is None or not found.suits(rules.left_out, rules.is_live):
        return False
    graph.add_records(path, found)
    kinds_met = (layer.kind for layer in found.layers if layer.has_attributes)
    graph.classes.update((name_of(kind), kind) for kind in kinds_met if name_of(kind) not in graph.classes)
    return True


def is_carried_by_state(value: object) -> bool:
    """Return whether an object's own ``state_dict`` and ``load_state_dict`` carry its state."""
    if isinstance(value, nn.Module) or not kinds.is_walked(value) or kinds.is_optimizer(value):
        return False
    return kinds.has_state_methods(value)


def attributes_of(value: object, rules: Rules) -> dict[str, object] | None:
    """Return the attributes of `value` that are the user's, or ``None`` if its attributes don't count."""
    if isinstance(value, types.FunctionType):
        return kinds.attributes(value)
    is_subclass = kinds.is_container(value) and not kinds.is_plain_container(value)
    if not is_subclass and (kinds.is_container(value) or not kinds.is_walked(value)):
        return None
    left_out = rules.left_out(value)
    found = kinds.attributes(value).items()
    return {
        n: child
        for n, child in found
        if n not in left_out and (kinds.is_leaf_type(type(child)) or not _is_wrappers(value, n, child))
    }


def _is_wrappers(owner: object, name: str, value: object) -> bool:
    """Return whether Lightning's wrappers (DDP) put `value` in place of a method for a call, and left it there.

    They set their own function as an attribute, and afterwards the method that the class has anyway.
    """
    if type(value) is types.MethodType:
        return value.__self__ is owner and getattr(type(owner), name, None) is value.__func__
    return type(value) is types.FunctionType and is_librarys(value)


def _of_function(graph: Graph, path: str, function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Add a function that other objects hold, which may keep a count as an attribute, and yield what it holds."""
    own = kinds.attributes(function)  # all that is in its `__dict__`
    graph.nodes[path] = Node(kept=function, attributes=own, raw=(list(own), list(map(id, own.values()))))
    yield from of_function(path, function)


def _of_class(graph: Graph, kind: type) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a user's class, which may be created in a function or in another class."""
    path = global_path(kind.__module__, kind.__qualname__)  # like a class at the top of a module
    if path not in graph.things:
        yield path, kinds.Namespace(owner=kind)


def _raw_of(value: object) -> tuple[list[str], list[int]] | None:
    if isinstance(value, kinds.Namespace) and value.names is not None:
        return None
    if kinds.has_slots(type(value)):
        return None
    found = kinds.dict_of(value)
    return list(found), list(map(id, found.values()))


_SEQUENCES = (list, deque)
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)
_values_of = operator.methodcaller("values")


class Unchanged:
    """Objects that are unchanged since they were recorded.

    Their attributes and items are compared by identity, at the speed of C. Only if one differs, each object is checked
    separately.

    Args:
        nodes: The objects, by path.
        has_changed: Checks one object separately.
    """

    def __init__(self, nodes: Mapping[str, Node], has_changed: Callable[[Node], bool]) -> None:
        self._nodes = dict(nodes)
        self._has_changed = has_changed
        self._note()

    def _note(self) -> None:
        """Record the current content of all of them."""
        self._one_by_one: list[str] = []
        self._owners: list[object] = []
        self._dicts: list[Any] = []
        self._sequences: list[Any] = []
        self._others: list[object] = []
        for path, node in self._nodes.items():
            if not self._takes(node):
                self._one_by_one.append(path)
        self._noted = self._look()

    def _takes(self, node: Node) -> bool:
        """Include an object in the common comparison; return whether that is possible."""
        value, kind = node.value, type(node.value)
        if node.holds_weakly or isinstance(value, threading.local):
            return False
        if node.mark is not None:
            found = self._dicts if kind in _MAPPINGS else self._sequences if kind in _SEQUENCES else self._others
            if node.attributes is not None or not _is_plain(value):
                return False
            found.append(value)
            return True
        if kind is kinds.Namespace:
            self._dicts += [] if node.raw is None else [vars(value.owner)]
            return node.raw is not None
        if node.raw is not None:
            self._owners.append(value)
            return True
        if node.attributes is None or not _has_filled_slots(value):
            return False
        self._others.append(value)
        if has_dict(kind):
            self._owners.append(value)
        return True

    def _look(self) -> tuple[list[int], bytes, bytes]:
        """Return the lengths of all dicts and sequences, the ids of all keys, and the ids of all values."""
        dicts = [*map(object.__getattribute__, self._owners, repeat("__dict__")), *self._dicts]
        filled = [*filter(None, dicts)]
        keys, values = chain.from_iterable(filled), chain.from_iterable(map(_values_of, filled))
        # For dicts, this finds nothing from Python 3.13 on: an object holds the values of its attributes itself.
        others = gc.get_referents(*self._others)
        lengths = [*map(len, dicts), *map(len, self._sequences)]
        return lengths, ids_in([*keys]), ids_in([*values, *chain.from_iterable(self._sequences), *others])

    def take_changed(self) -> list[str]:
        """Return the paths of the objects that have changed, and drop them from this collection."""
        is_same = self._look() == self._noted
        paths = self._one_by_one if is_same else list(self._nodes)
        changed = [path for path in paths if self._has_changed(self._nodes[path])]
        for path in changed:
            del self._nodes[path]
        if changed or not is_same:  # equal but no longer identical values are recorded again
            self._note()
        return changed


def _is_plain(value: Any) -> bool:
    """Return whether the ``id`` of the items of a short container or cell tell it apart from an earlier content.

    A large tensor may be freed, and leave its ``id`` to another. A cell must be bound: cells have no length.
    """
    if type(value) is types.CellType:
        items = kinds.contents_of_cell(value)
        return bool(items) and not _is_held_weakly(items[0])
    if type(value) not in (*_SEQUENCES, *_MAPPINGS) or len(value) >= MANY_ITEMS:
        return False
    return not any(map(_is_held_weakly, value.values() if isinstance(value, dict) else value))


def _is_held_weakly(value: object) -> bool:
    return hold(value) is not value


def _has_filled_slots(value: object) -> bool:
    """Return whether all slots of an object have a value. If one is emptied later, the object refers to fewer."""
    try:
        for _, slot in slots_of(type(value)):
            slot.__get__(value)
    except AttributeError:
        return False
    return True
