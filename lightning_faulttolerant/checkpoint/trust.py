"""Check whether another user could have written a file: the rule that SSH applies to its keys.

Every part of the path to the file belongs to this user or to root, and no other user can write to it.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator

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
