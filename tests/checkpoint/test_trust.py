"""An autosave is trusted only if no user other than this one and root could have written it."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.trust import why_not_trusted
from tests.processes import in_child

PLACES = ["run/file", "run", "."]


@pytest.fixture
def directory():
    """A directory of this user's below /tmp, which is sticky, with a subdirectory that holds a file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        root = Path(path).resolve()
        (root / "run").mkdir()
        (root / "run" / "file").write_text("")
        for place, mode in ((".", 0o755), ("run", 0o755), ("run/file", 0o644)):
            os.chmod(root / place, mode)
        yield root


def _link(directory, *, through):
    (directory / "opened").mkdir()
    os.chmod(directory / "opened", 0o777)
    links = {"link": "run", "opened/link": "../run", "again": "opened/link", "one": "two", "two": "one"}
    for name, target in links.items():
        (directory / name).symlink_to(target)
    return directory / through / "file"


def _mode(mode, place):
    return lambda directory: os.chmod(directory / place, mode)


def _enclosed(directory):
    os.chmod(directory, 0o700)
    os.chmod(directory / "run", 0o777)


# What is done, the reason, "" for none, which begins with a place, and the file, if it is another one.
PLACED = {
    "nobody else writes": (lambda directory: None, ""),
    **{
        f"everybody writes to {place} of mode {mode:o}": (
            _mode(mode, place),
            f"DIR/{place} is writable by everybody (mode 0{mode:o})",
        )
        for place in PLACES
        for mode in (0o757, 0o722)
    },
    "a sticky directory may not hold the file itself": (_mode(0o1777, "run"), "DIR/run is writable by everybody"),
    "nobody else enters a directory above": (_enclosed, ""),
    "a link": (lambda directory: _link(directory, through="link"), ""),
    "a link to one in an open directory": (lambda directory: _link(directory, through="again"), "DIR/opened is"),
    "links in a circle": (
        lambda directory: _link(directory, through="one"),
        "the permissions of DIR/one/file can't be read",
    ),
    "nothing": (lambda directory: directory / "nothing", "the permissions of DIR/nothing can't be read"),
    "a store": (lambda directory: "s3://bucket/run/file", "s3://bucket/run/file is in a store"),
    "a URL of a file": (lambda directory: f"file://{directory}/run/file", ""),
}
if os.geteuid() == 0:  # only root may give files away
    PLACED |= {
        f"{place} is somebody else's": (lambda d, place=place: os.chown(d / place, 12345, 0), f"DIR/{place} belongs to")
        for place in PLACES
    }


@pytest.mark.parametrize(("change", "reason"), PLACED.values(), ids=PLACED)
def test_who_else_could_have_written_it(directory, change, reason):
    """Neither the file, nor its directory, nor one above may be open to others; the place and its mode are named."""
    found = why_not_trusted(change(directory) or directory / "run" / "file")
    assert (found is None) == (not reason)
    assert (found or "").startswith(reason.replace("/.", "").replace("DIR", str(directory)))


GROUPS = {
    "others": (["somebody"], b"", True),
    "the user's own, as on systems where a umask of 002 is usual": ([], b"", False),
    "the user's own, with an access list that gives rights to others": ([], b"a list", True),
}


@pytest.mark.parametrize(("members", "access_list", "is_refused"), GROUPS.values(), ids=GROUPS)
def test_what_a_group_writes_to(directory, monkeypatch, members, access_list, is_refused):
    """A group with other members counts as others; the user's own does not, unless its rights are those of a list."""
    os.chmod(directory / "run", 0o775)
    user = pwd.getpwuid(os.geteuid())
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((user.pw_name, "x", number, members)))
    monkeypatch.setattr(pwd, "getpwall", lambda: [user])
    monkeypatch.setattr(os, "getxattr", lambda place, name: access_list)

    def main():  # what a process knows of groups, it keeps
        found = why_not_trusted(directory / "run" / "file")
        assert ("is writable by its group" in found) if is_refused else found is None

    assert in_child(main) == 0
