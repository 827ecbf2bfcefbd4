"""Check whether another user could have written a file, and let ``weights_only=True`` accept what this user wrote.

The first is the rule that SSH applies to its keys: every part of the path to the file belongs to this user or to root,
and no other user can write to it. The Python lines for the second are tested before a user is told to paste them.
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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

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
