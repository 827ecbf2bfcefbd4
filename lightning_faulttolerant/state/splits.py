"""The splits that a script drew: which samples each part has, and whether another start can get the same parts.

Parts have the names of the script's variables: in its modules, and in the running functions. The content of other drawn
data (lists, mappings, arrays, and single numbers) is kept by path.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import inspect
import sys
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.decoding import set_attribute
from lightning_faulttolerant.state.objects.walk import Rules, attributes_of, users_namespaces
from lightning_faulttolerant.state.orders import (
    NotPlainError,
    array_of,
    digest_of,
    elements_of,
    is_number,
    names_of,
    text_of,
)
from lightning_faulttolerant.state.reachable import is_a, is_users_frame
from lightning_faulttolerant.streaming import is_stream

INDICES = "indices"
PARTS = (Subset, SubsetRandomSampler)
"""The classes of a split's parts."""
_MAX_OBJECTS = 20_000
_FIRST_ITEMS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """A list, a mapping, or an array that an object holds.

    Args:
        value: The list, mapping, or array.
        owner: The object.
        name: The attribute of the object.
        digest: Differs if the elements or their order differ.
    """

    value: Any
    owner: object
    name: str
    digest: str

    def set(self, elements: Any) -> None:
        """Replace the elements, in the same object if it allows that."""
        if orders.fill(self.value, elements):
            return
        made: object = None
        if isinstance(self.value, tuple):
            made = tuple(elements)
        else:  # a read-only array
            made = self.value.copy()
            orders.fill(made, elements)
        set_attribute(self.owner, self.name, made)


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnContents:
    """Everything that was found.

    Args:
        lists: Lists, mappings, and arrays, by path.
        numbers: The texts of single numbers, by path.
        parts: The parts of splits, by path.
        datasets: The data sets, by path.
    """

    lists: dict[str, Content]
    numbers: dict[str, str]
    parts: dict[str, object]
    datasets: dict[str, object]


def contents_of(roots: Mapping[str, object], rules: Rules) -> DrawnContents:
    """Return the content that can be reached from `roots`.

    Args:
        roots: The objects to begin with, by name.
        rules: What is left out.
    """
    found = DrawnContents(lists={}, numbers={}, parts={}, datasets={})
    queue: deque[tuple[str, object]] = deque(roots.items())
    seen: set[int] = set()
    while queue and len(seen) < _MAX_OBJECTS:
        path, value = queue.popleft()
        if kinds.is_leaf(value) or id(value) in seen or is_stream(value):
            continue
        seen.add(id(value))
        if is_part(value):
            found.parts[path] = value
        if is_a(value, Dataset):
            found.datasets[path] = value
        if rules.is_live(value) and not is_a(value, (Dataset, *PARTS)):
            continue
        with contextlib.suppress(Exception):  # any class may raise anything: what can't be read is left alone
            for name, child in (attributes_of(value, rules) or {}).items():
                _add(found, queue.append, f"{path}.{name}", value, name, child)
            queue.extend([*_held_by(path, value)])
    return found


def is_part(value: object) -> bool:
    """Return whether `value` is a part of a split; its indices identify it."""
    return issubclass(type(value), PARTS)


def _add(
    found: DrawnContents,
    look_into: Callable[[tuple[str, object]], None],
    path: str,
    owner: object,
    name: str,
    value: Any,
) -> None:
    if is_number(value):
        found.numbers[path] = text_of(value)
    elif orders.is_ordered(value):
        if is_part(owner) and name == INDICES:
            return
        try:
            if len(value):
                found.lists[path] = Content(value=value, owner=owner, name=name, digest=orders.digest(value))
        except NotPlainError:
            look_into((path, value))
    else:
        look_into((path, value))


def _held_by(path: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, torch.nn.Module):
        yield from ((f"{path}.{name}", child) for name, child in value.named_children())
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", child) for key, child in islice(value.items(), _FIRST_ITEMS))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"{path}[{i}]", child) for i, child in enumerate(islice(value, _FIRST_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from ((f"{path}.{name}", getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield from ((f"{path}.{name}", child) for child in kinds.contents_of_cell(cell))


_LEVEL = 1
_WHOLE = "iu"
_UNNAMED = "a "
_UNKNOWN = "not all parts of its split are known"


class Parts:
    """The parts of splits in this process, with the indices that they had when they were recorded."""

    def __init__(self) -> None:
        self._parts: dict[str, object] = {}
        self._of_script: set[str] = set()  # the parts that training can't reach
        self._noted: dict[str, dict[str, Any]] = {}
        self._drawn: set[str] = set()  # the parts with unsorted indices
        self.digests: dict[str, str] = {}
        """A digest of each part's indices, by path."""

    def note(self, known: Mapping[str, object]) -> None:
        """Record the parts that training can reach, by path, and the other parts that the script holds."""
        found = {path: part for path, part in known.items() if _indices_of(part) is not None}
        if not found:
            return
        reached = {id(part) for part in found.values()}
        for path in [path for path in self._of_script if id(self._parts[path]) in reached]:
            self._of_script.remove(path)
            self._drawn.discard(path)
            del self._parts[path], self._noted[path], self.digests[path]
        self._parts.update(found)
        others = self._others()
        self._parts.update(others)
        self._of_script.update(others)
        for path, part in self._parts.items():
            if path in found or path not in self._noted:
                self._note(path, part)

    def _note(self, path: str, part: object) -> None:
        indices = _indices_of(part)
        if indices is None:  # another thread has just changed them
            return
        self.digests[path] = digest_of(indices.tolist())
        self._noted[path] = {"of": _of(part), INDICES: zlib.compress(indices.tobytes(), _LEVEL)}
        self._drawn.discard(path)
        if (indices[1:] < indices[:-1]).any():
            self._drawn.add(path)

    def has(self, part: object) -> bool:
        """Return whether a part was recorded before."""
        return any(_own(one, INDICES) is _own(part, INDICES) for one in self._parts.values())

    @property
    def drawn(self) -> list[str]:
        """The paths of the parts with unsorted indices, those that training can reach first."""
        paths = [path for path in self._noted if path in self._drawn]
        return sorted(paths, key=lambda path: path in self._of_script)

    def state_dict(self) -> dict[str, object]:
        """Return the indices and the data set of each part, by path; empty if none was drawn."""
        if not self._drawn:
            return {}
        first: dict[int, str] = {}
        same = {path: first.setdefault(id(_own(part, INDICES)), path) for path, part in self._parts.items()}
        return {path: {**self._noted[path], "same": same[path]} for path in self._parts}

    def put_back(self, saved: Mapping[str, object], digests: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Restore the indices of each part, if all parts of a data set are known.

        Args:
            saved: A `state_dict`.
            digests: The `digests` from the same time.

        Returns:
            The paths of the restored parts, and the paths of the others, with the reason.
        """
        # A part without a name, such as one left by an earlier fit, may differ in each start. It only completes splits.
        named = {path: digest for path, digest in self.digests.items() if not path.startswith(_UNNAMED)}
        others = [path for path, digest in named.items() if digests.get(path, digest) != digest]
        done: list[str] = []
        failed: dict[str, str] = {}
        for of in dict.fromkeys(self._noted[path]["of"] for path in others):
            here = _parts_of(of, self.state_dict())
            reason, matched = _matched(_parts_of(of, saved), here)
            own = {path for path in others if self._noted[path]["of"] == of}
            if reason or own - {path for part, _ in matched for path in part.paths}:
                failed.update(dict.fromkeys(sorted(own), reason or _UNKNOWN))
                continue
            for part, indices in matched:
                if indices != part.indices:
                    _set(self._parts[part.paths[0]], indices)
                    done += part.paths
            self.note({path: self._parts[path] for part in here for path in part.paths})
        return done, failed

    def _others(self) -> dict[str, object]:
        """Return the parts that only the script holds: a test set, whose samples training must not see."""
        seen = {id(_own(part, INDICES)) for part in self._parts.values()}
        splits = {_of(part) for part in self._parts.values()}
        names: dict[int, str] | None = None
        found: dict[str, object] = {}
        for value in _living_parts():
            indices = _own(value, INDICES)
            if id(indices) in seen or _of(value) not in splits or _indices_of(value) is None:
                continue
            seen.add(id(indices))
            names = names_of_parts() if names is None else names
            name, number = names.get(id(value), f"{_UNNAMED}{_of(value)}"), 1
            while (name if number == 1 else f"{name} ({number})") in {*found, *self._parts}:
                number += 1
            found[name if number == 1 else f"{name} ({number})"] = value
        return found


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """One part, which may be reached by several paths."""

    paths: tuple[str, ...]
    indices: list[int]

    @property
    def names(self) -> set[str]:
        """The paths that it has in every start."""
        return {path for path in self.paths if not path.startswith(_UNNAMED)}


def _parts_of(of: str, state: Mapping[str, Any]) -> list[_Part]:
    own = {path: part for path, part in state.items() if part["of"] == of}
    return [
        _Part(paths=tuple(p for p, other in own.items() if other["same"] == path), indices=_unpacked(part[INDICES]))
        for path, part in own.items()
        if part["same"] == path
    ]


def _matched(then: list[_Part], here: list[_Part]) -> tuple[str, list[tuple[_Part, list[int]]]]:
    """Match the current parts with the saved indices; return the reason if that fails, and the pairs.

    Parts that exist in only one of the starts, such as those of an earlier fit, don't matter if the others together
    hold the same samples.
    """
    left, matched = list(then), list[tuple[_Part, list[int]]]()
    for by_name in (True, False):
        for part in [part for part in here if part not in [one for one, _ in matched]]:
            found = [one for one in left if len(one.indices) == len(part.indices)]
            if by_name:
                found = [one for one in found if one.names & part.names]
            if len(found) == 1:
                left.remove(found[0])
                matched.append((part, found[0].indices))
    if sorted(chain(*(part.indices for part, _ in matched))) == sorted(chain(*(indices for _, indices in matched))):
        return "", matched
    unmatched = [len(part.indices) for part in here if part not in [one for one, _ in matched]]
    if any(len(part.indices) in unmatched for part in left):
        return "its split has parts of the same size that can't be distinguished", []
    return _UNKNOWN, []


def _living_parts() -> Iterator[object]:
    """Yield all parts that exist in this process, without calling code of any other object."""
    classes = list(PARTS)
    for kind in classes:
        classes += type.__subclasses__(kind)
    wanted = set(map(id, classes))
    yield from [value for value in gc.get_objects() if id(type(value)) in wanted]


def _own(part: object, name: str) -> Any:
    """Return a part's own attribute: a property of a subclass may read a file."""
    return kinds.attributes(part).get(name)


def _of(part: object) -> str:
    """Return a name for the whole of a part: all data sets of one class and length count as one."""
    dataset = _own(part, "dataset")
    return f"{type(part).__qualname__} of {type(dataset).__qualname__} [{length_of(dataset)}]"


def _indices_of(part: object) -> Any:
    """Return the indices of a part in an array, or ``None`` if they are not integers in a plain container."""
    indices = _own(part, INDICES)
    if isinstance(indices, torch.Tensor):
        is_plain = indices.device.type == "cpu" and not indices.is_floating_point() and not indices.is_complex()
        indices = indices.detach().numpy() if is_plain else None
    if kinds.is_array(indices):
        is_plain = indices.ndim == 1 and indices.dtype.kind in _WHOLE
        return indices.astype("int64") if is_plain else None
    if not isinstance(indices, tuple) and (isinstance(indices, dict) or not kinds.is_plain_container(indices)):
        return None
    one_of_each = {type(index): index for index in indices}.values()
    if isinstance(indices, set) or not all(isinstance(i, int) or kinds.is_numpy(i, "integer") for i in one_of_each):
        return None
    try:
        return array_of(list(indices), "int64")
    except OverflowError:
        return None


def _unpacked(packed: bytes) -> list[int]:
    data = bytearray(zlib.decompress(packed))
    found: list[int] = torch.frombuffer(data, dtype=torch.int64).tolist() if data else []
    return found


def _set(part: object, indices: list[int]) -> None:
    Content(value=_own(part, INDICES), owner=part, name=INDICES, digest="").set(indices)


def length_of(dataset: Any) -> int | None:
    """Return the number of samples in a data set; ``None`` if it has no length."""
    if isinstance(dataset, IterableDataset):  # its length may run expensive code of the data set
        return None
    with contextlib.suppress(Exception):
        return len(dataset)
    return None


def may_be_samples(value: object, datasets: Iterable[object]) -> bool:
    """Return whether `value` may hold the samples of one of these data sets, or a value for each of them.

    A value that is shorter than each of them does not. Arrays and lists of names are exceptions: they may be data of
    another kind. If a data set has no length, any list may.
    """
    if isinstance(value, torch.Tensor) or kinds.is_array(value):
        return True
    if not isinstance(value, dict) and names_of(elements_of(value)):
        return True
    lengths = [length_of(dataset) for dataset in datasets]
    known = [length for length in lengths if length is not None]
    return len(known) < len(lengths) or not known or num_values(value) >= min(known)


def num_values(value: Any) -> int:
    """Return the number of values in a list or a mapping, including nested ones."""
    if isinstance(value, dict):
        return sum(map(num_values, value.values()))
    if isinstance(value, (list, tuple, set, frozenset)) or kinds.is_container(value):
        return sum(map(num_values, value))
    return kinds.num_items(value) or 1


_FEW = 16
_NUM_REFERENCES = 3  # to a snapshot: the frame's, our variable's, and the argument of the counting function


def names_of_parts() -> dict[int, str]:
    """Return the names of the parts that are in variables of the user's modules or of running functions."""
    found: dict[int, str] = {}
    for module, namespace in users_namespaces({}).items():
        _note(found, module, namespace.attributes())
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if _has_variables(frame) and is_users_frame(frame):
            _note_variables(found, frame)
        frame = frame.f_back
    return found


def _has_variables(frame: types.FrameType) -> bool:
    """Return whether a frame has variables that can be read without changing what the script sees.

    Before Python 3.13, reading updates the one dict that `locals` returns, and a function may hold that dict.
    """
    code = frame.f_code
    if not code.co_flags & inspect.CO_OPTIMIZED:  # a module's, or a class's: its namespace itself
        return True
    return bool(code.co_varnames or code.co_cellvars or code.co_freevars) and not _calls_locals(code)


def _calls_locals(code: types.CodeType) -> bool:
    if "locals" not in code.co_names:  # it may also be a method's: pytest's asserts call one
        return False
    return any(one.argval == "locals" and one.opname == "LOAD_GLOBAL" for one in dis.get_instructions(code))


def _note_variables(found: dict[int, str], frame: types.FrameType) -> None:
    variables = frame.f_locals
    _note(found, f"{frame.f_code.co_name}()", variables)
    is_snapshot = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    # Before Python 3.13 the frame keeps its snapshot, and so every object that the function deletes later. If the frame
    # is traced, the snapshot is written back into the variables.
    if is_snapshot and sys.getrefcount(variables) <= _NUM_REFERENCES and frame.f_trace is None:
        variables.clear()


def _note(found: dict[int, str], owner: str, variables: Mapping[str, Any]) -> None:
    for name, value in list(variables.items()):
        if is_part(value):
            found.setdefault(id(value), f"{owner}.{name}")
        elif type(value) in (list, tuple, dict) and len(value) <= _FEW:
            items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
            for key, item in items:
                if is_part(item):
                    found.setdefault(id(item), f"{owner}.{name}[{key!r}]")
