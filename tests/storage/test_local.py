"""What is known of the disk that a directory is on, and the names of files that are being written there."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

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
80
81 1 254:0 / /
82 1 254:0 / - rw -
83 1 254:0 / / rw ext4 /dev/vda rw
"""
TYPES = {
    **dict.fromkeys(["27", "36", "70"], "ext4"),
    **dict(zip(["41", "52", "60", "61"], ["nfs4", "btrfs", "fuse.s3fs", "tmpfs"], strict=True)),
    **dict(zip(["62", "63", "6"], ["overlay", "cifs", "xfs"], strict=True)),
    **dict.fromkeys(["80", "81", "82", "83", "64", "1", ""], ""),  # not understood, or not there
}


def test_type_of_a_mount_is_found_by_its_id() -> None:
    """The line is found whatever its paths contain; what is not understood has no type."""
    assert {mount_id: type_of_mount(mount_id, MOUNTS) for mount_id in TYPES} == TYPES


def test_only_known_file_systems_are_local(tmp_path: Path) -> None:
    """Memory is local; a special file system, and a directory that is not there, are not."""
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm")
    assert is_on_local_disk("/dev/shm")
    assert not is_on_local_disk("/proc")
    assert not is_on_local_disk(str(tmp_path / "missing"))


def test_no_temporary_name_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names differ within a process and from those of its forks, even by their end, and cost one call of the system."""
    names = [temporary_name("a.ckpt") for _ in range(50)]
    monkeypatch.delattr("secrets.token_hex")
    monkeypatch.delattr("secrets.randbits")
    names += [temporary_name("a.ckpt") for _ in range(50)]
    monkeypatch.undo()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        of_forks = pool.map(temporary_name, ["a.ckpt"] * 100)
    tails = {name.rpartition("-")[2] for name in (*names, *of_forks)}  # without the process id
    assert len({*names, *of_forks}) == len(tails) == 200
    assert all(is_of_this_process(name) for name in names)
    assert not any(is_of_this_process(name) for name in of_forks)
