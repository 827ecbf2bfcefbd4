"""An autosave is trusted if only this user and root could have written it; objects that it keeps as bytes come back."""

from __future__ import annotations

import grp
import io
import os
import pwd
import tempfile
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.preprocessing import LabelEncoder
from torch import nn

from lightning_faulttolerant.checkpoint.trust import classes_in, pack, unpack, why_not_trusted
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.errors import CheckpointError
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


# Objects that are kept as bytes come back in their places, and share what they shared.


@dataclass
class Holds:
    first: Any
    second: Any = None


class Color(Enum):
    """A key that weights_only refuses."""

    RED = 1


def again(checkpoint):
    """Return a checkpoint after packing, writing, loading with weights_only=True, and unpacking."""
    packed, buffer = pack(checkpoint), io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    buffer.seek(0)
    loaded, pool = torch.load(buffer, weights_only=True)
    unpack(loaded, pool)
    return loaded


def test_all_kinds_come_back_in_their_order():
    """Objects come back also as keys, in tuples, and in nested dicts and lists; a dict keeps its order."""
    checkpoint = {
        "path": Path("/data"),
        "nested": {"list": [1, {"deep": Path("/deep")}], 3: Fraction(1, 3)},
        "tuple": (1, (2, Path("/in/a/tuple"))),
        "keys": {Color.RED: 1},
        "alike": {1: Path("/one"), "1": Path("/text")},
        "class": Fraction,
        "last": "plain",
    }
    assert again(checkpoint) == checkpoint
    assert list(again(checkpoint)) == list(checkpoint)
    batch_norm = nn.BatchNorm1d(2).state_dict()
    assert again({"state_dict": batch_norm, **checkpoint})["state_dict"]._metadata == batch_norm._metadata


def test_what_is_shared_stays_shared():
    """Objects share again with each other, with plain containers, and with tensors, whose memory is written once."""
    module, shared, encoder = nn.Linear(200, 200), [1, 2], LabelEncoder()
    checkpoint = {
        "state_dict": module.state_dict(),
        "module": module,
        "plain": {"shared": shared},
        "one": Holds(shared, encoder),
        "two": encoder,
        "weight": Holds(module.weight),
    }
    packed, buffer = pack(checkpoint), io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    assert buffer.tell() < 1.1 * 4 * 200 * 201 + 10_000
    found = again(checkpoint)
    assert found["one"].first is found["plain"]["shared"]
    assert found["one"].second is found["two"]
    assert found["weight"].first is found["module"].weight
    assert found["module"].weight.data_ptr() == found["state_dict"]["weight"].data_ptr()
    assert isinstance(found["module"].weight, nn.Parameter)


def test_the_users_own_containers_are_left_alone():
    """Objects are replaced in a copy of their container, cycles too; where there is nothing to keep, none is copied."""
    own = {"path": Path("/data"), "plain": [1]}
    ring: list[Any] = [own]
    ring.append(ring)
    found = again({"own": own, "ring": ring})
    assert found["own"] == own == {"path": Path("/data"), "plain": [1]}
    assert found["ring"][1] is found["ring"]
    assert found["ring"][0] is found["own"]
    inner = OrderedDict(weight=torch.zeros(2))
    packed = pack({"state_dict": inner, "epoch": 3})
    assert packed.checkpoint["state_dict"] is inner
    assert packed.pool == {}


def test_what_can_not_be_pickled_or_recreated_is_named(monkeypatch):
    """It stays as it is, and the others are still kept as bytes; a class that is gone is named with its place."""
    shared = Fraction(1, 3)
    packed = pack({"bad": Holds(shared, lambda: 1), "good": Holds(shared, Path("/data"))})
    assert list(packed.failures) == ["bad"]
    assert "Holds: " in packed.failures["bad"]
    assert classes_in(packed.pool) == {"good": f"{__name__}.Holds"}
    assert unsafe_paths(packed.checkpoint) == ["bad"]
    loaded = dict(packed.checkpoint)
    unpack(loaded, packed.pool)
    assert loaded["good"] == Holds(shared, Path("/data"))
    packed = pack({"here": {"mine": Holds(1)}})
    monkeypatch.delattr(f"{__name__}.Holds")
    with pytest.raises(
        CheckpointError, match=rf"here/mine, an object of the class {__name__}.Holds, can't be recreated"
    ):
        unpack(packed.checkpoint, packed.pool)
