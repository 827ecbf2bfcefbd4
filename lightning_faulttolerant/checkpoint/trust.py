"""What ``weights_only=True`` refuses: whether a file is trusted, and objects that a checkpoint keeps as bytes.

A file is trusted by the rule that SSH applies to its keys: every part of its path belongs to this user or to root, and
no other user can write to it. The Python lines that let ``weights_only=True`` accept what this user wrote are tested
before a user is told to paste them.

Objects that it refuses are bytes, so that the file as a whole still loads. One pickler makes all the bytes. What the
objects share with each other, with the plain containers of the checkpoint, and with its tensors stays shared, as if
``torch.save`` had written everything.
"""

from __future__ import annotations

import builtins
import functools
import grp
import importlib
import io
import os
import pickle
import pwd
import re
import stat
import sys
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from lightning_faulttolerant.checkpoint.verify import (
    CONTAINERS,
    PLAIN_TENSORS,
    is_surely_safe,
    loads_safely,
    unsafe_paths,
)
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.state.packing import blob_to_tensor, tensor_to_blob
from lightning_faulttolerant.storage.store import is_url, local_path

_ACCESS_LIST = "system.posix_acl_access"
_MAX_LINKS = 40


def why_not_trusted(path: str | os.PathLike[str]) -> str | None:
    """Return who else could have written the file at a path, or ``None`` if only this user and root could.

    As in SSH, directories above the home directory are trusted. A directory above the file that others may write to is
    allowed if it is sticky, like ``/tmp``: there, users can't replace each other's files.

    Args:
        path: An existing file or directory, or a URL.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     print(why_not_trusted(directory))
        ...     os.chmod(directory, 0o777)
        ...     print(why_not_trusted(directory).endswith("is writable by everybody (mode 0777)"))
        None
        True
    """
    if is_url(path):
        return f"{os.fspath(path)} is in a store, where permissions can't be read from here"
    given = os.path.abspath(local_path(path))
    try:
        target = os.path.realpath(given, strict=True)
        holder = target if os.path.isdir(target) else os.path.dirname(target)
        home = os.path.realpath(_home())
        for place in dict.fromkeys(_looked_up(given)):
            if _is_inside(home, place) and _is_inside(target, home):
                continue
            reason = _why_open(place, may_be_sticky=place != holder)
            if reason is not None:
                return f"{place} {reason}"
    except OSError as error:
        return f"the permissions of {given} can't be read: {error}"
    return None


def _looked_up(path: str) -> Iterator[str]:
    """Yield each part that is looked up on the way to an absolute path, without links in its parents."""
    place, todo, num_links = "/", path.split("/"), 0
    yield place
    while todo:
        name = todo.pop(0)
        if name in ("", "."):
            continue
        if name == "..":
            place = os.path.dirname(place)
            continue
        following = os.path.join(place, name)
        yield following
        if not os.path.islink(following):
            place = following
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(f"{path} leads through more than {_MAX_LINKS} links")
        link = os.readlink(following)
        place = "/" if link.startswith("/") else place
        todo = [*link.split("/"), *todo]


def _why_open(place: str, *, may_be_sticky: bool) -> str | None:
    """Return why other users can change a file, a directory or a link."""
    status = os.lstat(place)
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to {_user_name(status.st_uid)}"
    is_sticky = bool(status.st_mode & stat.S_ISVTX) and stat.S_ISDIR(status.st_mode)
    if stat.S_ISLNK(status.st_mode) or (is_sticky and may_be_sticky) or _is_out_of_reach(place):
        return None
    mode = f"(mode {stat.S_IMODE(status.st_mode):04o})"
    if status.st_mode & stat.S_IWOTH:
        return f"is writable by everybody {mode}"
    if status.st_mode & stat.S_IWGRP and (_has_access_list(place) or not _is_users_alone(status.st_gid)):
        return f"is writable by its group {_group_name(status.st_gid)} {mode}"
    return None


def _is_out_of_reach(place: str) -> bool:
    """Return whether it is in a directory that no other user can enter, whatever is allowed below."""
    while place != "/":
        place = os.path.dirname(place)
        status = os.lstat(place)
        if status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IXGRP | stat.S_IXOTH):
            return True
    return False


def _is_inside(path: str, directory: str) -> bool:
    return path != directory and os.path.commonpath([path, directory]) == directory


def _has_access_list(place: str) -> bool:
    """Return whether users and groups have separate rights there: the mode's group rights then combine all of them."""
    try:
        return bool(os.getxattr(place, _ACCESS_LIST))
    except OSError:
        return False


@functools.cache
def _is_users_alone(group_id: int) -> bool:
    """Return whether a group is the private one that many systems create for each user, with an umask of 002."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:  # in a container a user may have a number and no name
        return False
    others = any(other.pw_gid == group_id and other.pw_uid != user.pw_uid for other in pwd.getpwall())
    return group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name} and not others


def _home() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_dir
    except KeyError:
        return "/"


def _user_name(user_id: int) -> str:
    try:
        return f"the user {pwd.getpwuid(user_id).pw_name}"
    except KeyError:
        return f"the user {user_id}"


def _group_name(group_id: int) -> str:
    try:
        return grp.getgrgid(group_id).gr_name
    except KeyError:
        return str(group_id)


_REFUSED_CLASS = re.compile(r"but got <class '([\w.]+)'>")
_MAX_ATTEMPTS = 20


def lines_to_allow(values: Iterable[object]) -> list[str] | None:
    """Return lines after which objects load with ``weights_only=True``, or ``None`` if none would help.

    Args:
        values: The objects. They are written into memory and loaded from there.

    Example:
        >>> from fractions import Fraction
        >>> lines_to_allow([Fraction(1, 3)])
        ['from fractions import Fraction', 'torch.serialization.add_safe_globals([Fraction])']
    """
    if not hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint"):  # torch before 2.6
        return None
    buffer = io.BytesIO()
    try:
        torch.save(list(values), buffer)
        buffer.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
        found = {name: _found(name) for name in names}
    except Exception:  # noqa: BLE001 - any class may raise anything when it is pickled
        return None
    if not _suffice(buffer, found) or not all(map(_may_be_allowed, found.values())):
        return None
    return _lines(found)


def _suffice(buffer: io.BytesIO, found: dict[str, Any]) -> bool:
    """Return whether everything loads once these are allowed; classes that only the load attempt names are added."""
    for _ in range(_MAX_ATTEMPTS):
        buffer.seek(0)
        try:
            with torch.serialization.safe_globals(list(found.values())):
                torch.load(buffer, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = _REFUSED_CLASS.search(str(error))
            if named is None or named[1] in found:
                return False
            try:
                found[named[1]] = _found(named[1])
            except (ImportError, AttributeError):
                return False
        except Exception:  # noqa: BLE001 - a class may run anything when it is loaded
            return False
        else:
            return True
    return False


def _found(name: str) -> object:
    """Return the object with this full name; its module is the longest part in front that can be imported."""
    parts = name.split(".")
    for num_parts in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:num_parts]))
        except ImportError:
            continue
        for part in parts[num_parts:]:
            found = getattr(found, part)
        return found
    raise ImportError(name)


def _may_be_allowed(value: object) -> bool:
    # With getattr or a similar function allowed, a file could call anything.
    return isinstance(value, type) or getattr(value, "__module__", None) != builtins.__name__


def _lines(found: Mapping[str, object]) -> list[str]:
    imports, listed, modules = set(), [], dict[str, str]()
    for name, value in found.items():
        module, path = _place_of(name, value)
        first, _, rest = path.partition(".")
        alias = first if modules.setdefault(first, module) == module else f"{module.replace('.', '_')}_{first}"
        if module not in ("builtins", "__main__", "__mp_main__"):
            imports.add(f"from {module} import {first}" + ("" if alias == first else f" as {alias}"))
        listed.append(f"{alias}.{rest}" if rest else alias)
    return [*sorted(imports), f"torch.serialization.add_safe_globals([{', '.join(listed)}])"]


def _place_of(name: str, value: object) -> tuple[str, str]:
    """Return the module, and the path in it, from which the object with this full name can be imported."""
    path = str(getattr(value, "__qualname__", name.rpartition(".")[2]))
    return (name.removesuffix(f".{path}") if name.endswith(f".{path}") else str(value.__module__)), path


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
    found, places, failures = dict[Path, object](), dict[int, Path](), dict[str, str]()
    for key, value in checkpoint.items():
        if key not in leave:
            _look(value, (key,), found, places)
    pool: Pool | None = None
    while pool is None:
        pool = _pickled(found, places, failures)
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


def _look(value: object, path: Path, found: dict[Path, object], places: dict[int, Path]) -> None:
    """Add the objects that have to be kept as bytes to `found`, and the plain containers, by identity, to `places`."""
    if is_surely_safe(value) or id(value) in places:
        return
    if _is_for_bytes(value):
        found[path] = value
    elif type(value) in CONTAINERS:
        if type(value) in _WITH_PLACES:
            places[id(value)] = path
        for key, child in _items(value):
            _look(child, (*path, key), found, places)


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
    if kind in _refused and kind not in torch.serialization.get_safe_globals():
        return True
    if loads_safely(value):
        return False
    _refused.add(kind)
    return True


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
        self._tensors: list[torch.Tensor] = []

    def next(self, value: object) -> tuple[bytes, list[torch.Tensor]]:
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
