"""Objects that ``weights_only=True`` refuses, kept in a checkpoint as bytes, so that the file as a whole still loads.

One pickler makes all the bytes. What the objects share with each other, with the plain containers of the checkpoint,
and with its tensors stays shared, as if ``torch.save`` had written everything.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_faulttolerant.checkpoint.verify import (
    CONTAINERS,
    PLAIN_TENSORS,
    is_surely_safe,
    loads_safely,
    unsafe_paths,
)
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.state.packing import blob_to_tensor, tensor_to_blob

_WITH_PLACES = (dict, OrderedDict, list)
_TENSOR, _PLACE = "tensor", "place"

Path = tuple[Any, ...]
Pool = dict[str, dict[str, Any]]

# A class is found to be refused by writing and loading an object of it: once is enough.
_refused: set[type] = set()


class Packed(NamedTuple):
    """A checkpoint with texts in the place of objects that would not load, and these objects."""

    checkpoint: dict[str, object]
    pool: Pool
    """For each object, by its place: its class, its bytes, and its tensors. Only texts, tensors, and lists."""
    values: list[object]
    """The objects, in the order of the pool."""
    failures: dict[str, str]
    """The reason why an object can't be kept as bytes, by its place."""


def pack(checkpoint: Mapping[str, object], *, leave: Collection[str] = ()) -> Packed:
    """Keep objects that ``weights_only=True`` would not load as bytes. Objects that can't be pickled stay in place.

    Args:
        checkpoint: Dicts, lists and tuples are walked, and copied if something in them is replaced.
        leave: Keys that are not searched.

    Example:
        >>> from pathlib import Path
        >>> packed = pack({"epoch": 3, "mine": {"folder": Path("/data")}})
        >>> unpack(packed.checkpoint, packed.pool)
        >>> packed.checkpoint == {"epoch": 3, "mine": {"folder": Path("/data")}}
        True
    """
    search = _Search(checkpoint, leave)
    found, failures = dict(search.found), dict[str, str]()
    pool: Pool | None = None
    while pool is None:
        pool = _pickled(found, search.places, failures)
    if not pool:
        return Packed(dict(checkpoint), {}, [], failures)
    copied: dict[str, object] = _copied(dict(checkpoint), {}, leave)
    for path, entry in zip(found, pool.values(), strict=True):
        _at(copied, path[:-1])[path[-1]] = f"{entry['class']}, kept as bytes by lightning_faulttolerant"
    return Packed(copied, pool, list(found.values()), failures)


def unpack(checkpoint: dict[str, object], pool: Mapping[str, Any], *, leave: Collection[str] = ()) -> None:
    """Put the objects back in their places. This unpickles, which may run any code: pass only trusted content.

    Args:
        checkpoint: The checkpoint that `pack` returned, loaded again.
        pool: Its pool.
        leave: Keys in which nothing is replaced.

    Raises:
        CheckpointError: If an object can't be created again; the message names its place and its class.
    """
    unpickler = _Unpickler(pool, checkpoint)
    for place, entry in pool.items():
        try:
            value = unpickler.load()
        except Exception as error:
            raise CheckpointError(
                f"{place}, an object of the class {entry['class']}, can't be recreated from its bytes: "
                f"{type(error).__name__}: {error}. Was the class renamed, moved, or changed since it was saved?"
            ) from error
        path = entry["path"]
        if path[0] not in leave:
            _at(checkpoint, path[:-1])[path[-1]] = value


def classes_in(pool: Mapping[str, Any]) -> dict[str, str]:
    """Return the class of each object that is kept as bytes, by its place."""
    return {place: str(entry["class"]) for place, entry in pool.items()}


class _Search:
    """Searches for the objects that have to be kept as bytes.

    Args:
        checkpoint: The checkpoint to search.
        leave: Keys that are not searched.
    """

    def __init__(self, checkpoint: Mapping[str, object], leave: Collection[str]) -> None:
        self.found: list[tuple[Path, object]] = []
        self.places: dict[int, Path] = {}
        """The place of each plain container, by its identity."""
        for key, value in checkpoint.items():
            if key not in leave:
                self._look(value, (key,))

    def _look(self, value: object, path: Path) -> None:
        if is_surely_safe(value) or id(value) in self.places:
            return
        if _is_for_bytes(value):
            self.found.append((path, value))
        elif type(value) in CONTAINERS:
            if type(value) in _WITH_PLACES:
                self.places[id(value)] = path
            for key, child in _items(value):
                self._look(child, (*path, key))


def _is_for_bytes(value: Any) -> bool:
    """Return whether a value itself would not load, whatever is done to the values further in."""
    kind = type(value)
    if is_surely_safe(value) or kind is list:
        return False
    if kind is tuple:  # it can't be changed on loading, so it is kept as bytes with its content
        return any(_is_for_bytes(child) for child in value)
    if kind is dict or kind is OrderedDict:
        attributes = vars(value) if kind is OrderedDict else {}  # a module's state_dict has one, "_metadata"
        return not all(is_surely_safe(key) or loads_safely(key) for key in value) or bool(unsafe_paths(attributes))
    if kind in _refused and kind not in _allowed():
        return True
    if loads_safely(value):
        return False
    _refused.add(kind)
    return True


def _allowed() -> Collection[object]:
    return torch.serialization.get_safe_globals()


def _items(container: Any) -> Iterator[tuple[object, object]]:
    yield from container.items() if isinstance(container, dict) else enumerate(container)


def _at(checkpoint: Any, path: Collection[object]) -> Any:
    for key in path:
        checkpoint = checkpoint[key]
    return checkpoint


def _copied(value: Any, memo: dict[int, object], leave: Collection[str] = ()) -> Any:
    """Return a copy of plain containers that share each other like the originals; nothing else is copied."""
    kind = type(value)
    if kind not in CONTAINERS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is tuple:
        return tuple(_copied(child, memo) for child in value)
    copied = memo[id(value)] = kind()
    if kind is list:
        copied.extend(_copied(child, memo) for child in value)
        return copied
    for key, child in value.items():
        copied[key] = child if key in leave else _copied(child, memo)
    if kind is OrderedDict:
        vars(copied).update(vars(value))
    return copied


def _pickled(found: dict[Path, object], places: Mapping[int, Path], failures: dict[str, str]) -> Pool | None:
    """Return the bytes of objects. If one has none, move it to `failures` and return ``None``."""
    pickler = _ReferencePickler(places)
    pool: Pool = {}
    for path, value in found.items():
        place = "/".join(str(key) for key in path)
        try:
            own, tensors = pickler.next(value)
        except Exception as error:  # noqa: BLE001 - any class may raise anything when it is pickled
            failures[place] = f"{_class_of(value)}: {type(error).__name__}: {error}"
            del found[path]
            return None  # the pickler remembers what it met in that object, and those bytes are lost
        while place in pool:  # the keys 1 and "1" differ
            place += "'"
        pool[place] = {"class": _class_of(value), "path": list(path), "pickle": blob_to_tensor(own), "tensors": tensors}
    return pool


def _class_of(value: object) -> str:
    kind = value if isinstance(value, type) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


class _ReferencePickler(pickle.Pickler):
    """Pickles objects one after the other; for tensors and plain containers, it writes only references."""

    def __init__(self, places: Mapping[int, Path]) -> None:
        self._buffer = io.BytesIO()
        super().__init__(self._buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._places = places
        self._numbers: dict[int, int] = {}
        self._tensors: list[Tensor] = []

    def next(self, value: object) -> tuple[bytes, list[Tensor]]:
        """Return the bytes of an object, and its tensors except those of earlier objects."""
        begin, num_tensors = self._buffer.tell(), len(self._tensors)
        self.dump(value)
        return bytes(self._buffer.getbuffer()[begin:]), self._tensors[num_tensors:]

    def persistent_id(self, value: Any) -> tuple[str, object] | None:
        kind = type(value)
        if kind in PLAIN_TENSORS and is_surely_safe(value):
            number = self._numbers.setdefault(id(value), len(self._tensors))
            self._tensors += [value] if number == len(self._tensors) else []
            return _TENSOR, number
        if kind in _WITH_PLACES and id(value) in self._places:
            return _PLACE, self._places[id(value)]
        return None


class _Unpickler(pickle.Unpickler):
    """Loads the bytes that `_ReferencePickler` has written."""

    def __init__(self, pool: Mapping[str, Any], checkpoint: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(b"".join(tensor_to_blob(entry["pickle"]) for entry in pool.values())))
        self._tensors = [tensor for entry in pool.values() for tensor in entry["tensors"]]
        self._checkpoint = checkpoint

    def persistent_load(self, reference: Any) -> object:
        kind, which = reference
        return self._tensors[which] if kind == _TENSOR else _at(self._checkpoint, which)

    def find_class(self, module: str, name: str) -> object:
        # In a process that multiprocessing has spawned, the script has another name.
        if module == "__mp_main__" and module not in sys.modules:
            module = "__main__"
        return super().find_class(module, name)
