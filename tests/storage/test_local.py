"""What is known of the disk that a directory is on."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest

from lightning_faulttolerant.storage import local
from lightning_faulttolerant.storage.local import (
    is_of_this_process,
    is_on_local_disk,
    temporary_name,
    type_of_mount,
)

# A bind mount, escapes, a subvolume of btrfs, two mounts on one path, separators of str.splitlines, names like fields.
MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
36 27 254:0 /srv/data /mnt/data rw,noatime master:1 shared:2 - ext4 /dev/vda rw
41 27 0:45 / /mnt/my\\040shared\\011disk rw shared:7 - nfs4 server:/my\\040data rw,addr=10.0.0.1
52 27 0:33 /@home /home rw,relatime shared:3 - btrfs /dev/vdb rw,subvolid=257
60 27 0:50 / /mnt/data rw - fuse.s3fs s3fs rw
61 60 0:51 / /mnt/data rw - tmpfs tmpfs rw
62 27 0:52 /- /mnt/-\x85 rw propagate_from:2 - overlay - rw
63 27 0:53 / /mnt/\x0b64 rw - cifs //server/ext4 rw
6 27 0:54 / /mnt/short rw - xfs /dev/vdc rw
70 27 0:55 - - rw - ext4 /dev/vdd rw
"""


@pytest.mark.parametrize(
    ("mount_id", "kind"),
    [
        ("27", "ext4"),
        ("36", "ext4"),
        ("41", "nfs4"),
        ("52", "btrfs"),
        ("60", "fuse.s3fs"),
        ("61", "tmpfs"),
        ("62", "overlay"),
        ("63", "cifs"),
        ("6", "xfs"),
        ("70", "ext4"),
        ("64", ""),
        ("1", ""),
        ("", ""),
    ],
)
def test_type_of_a_mount_is_found_by_its_id(mount_id: str, kind: str) -> None:
    """The line is found whatever its paths contain, and however many optional fields it has."""
    assert type_of_mount(mount_id, MOUNTS) == kind


@pytest.mark.parametrize("line", ["27", "27 1 254:0 / /", "27 1 254:0 / - rw -", "27 1 254:0 / / rw ext4 /dev/vda rw"])
def test_a_line_that_is_not_understood_has_no_type(line: str) -> None:
    """A type that is not known is not that of a local disk."""
    assert type_of_mount("27", line) == ""


def mount_id_of(directory: Path) -> str:
    """Return the id of the mount that a directory is on."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
    finally:
        os.close(descriptor)
    return next(line.split()[1] for line in lines if line.startswith("mnt_id:"))


@pytest.mark.parametrize(
    "kind", ["ext4", "btrfs", "tmpfs", "overlay", "nfs4", "fuse.s3fs", "9p", "virtiofs", "unheard"]
)
def test_only_known_file_systems_are_local(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mount of the directory decides, not another one that is listed with it."""
    other = "nfs4" if kind == "ext4" else "ext4"
    mounts = tmp_path / "mounts"
    mounts.write_text(
        f"1000001 1 0:1 / {tmp_path} rw - {other} a rw\n"
        f"{mount_id_of(tmp_path)} 1 0:99 / / rw - {kind} b rw\n"
        f"1000002 1 0:1 / {tmp_path} rw - {other} a rw\n"
    )
    monkeypatch.setattr(local, "_MOUNTS", mounts)
    assert is_on_local_disk(str(tmp_path)) == (kind in ("ext4", "btrfs", "tmpfs", "overlay"))


def test_what_can_not_be_found_out_is_not_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the directory, its line, or the list, as on other systems than Linux, nothing is known."""
    assert not is_on_local_disk(str(tmp_path / "missing"))
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(local, "_MOUNTS", mounts)
    assert not is_on_local_disk(str(tmp_path))
    mounts.write_text("")
    assert not is_on_local_disk(str(tmp_path))


def test_memory_is_local() -> None:
    """The type of a real mount is found."""
    memory = Path("/dev/shm")
    if not memory.is_dir():
        pytest.skip("no /dev/shm")
    assert is_on_local_disk(str(memory))
    assert not is_on_local_disk("/proc")


def test_no_temporary_name_comes_twice() -> None:
    """Names differ within a process, and a fork's are told apart from those of its parent, even by their end."""
    names = [temporary_name("a.ckpt") for _ in range(100)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        of_forks = pool.map(temporary_name, ["a.ckpt"] * 100)
    assert len({*names, *of_forks}) == 200
    tails = {name.rpartition("-")[2] for name in (*names, *of_forks)}  # without the process id
    assert len(tails) == 200
    assert all(is_of_this_process(name) for name in names)
    assert not any(is_of_this_process(name) for name in of_forks)


def test_temporary_names_ask_for_random_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is asked for random bytes at the first name, not at each: meanwhile, other threads would run."""
    temporary_name("a.ckpt")
    monkeypatch.delattr("secrets.token_hex")
    monkeypatch.delattr("secrets.randbits")
    assert temporary_name("a.ckpt") != temporary_name("a.ckpt")
