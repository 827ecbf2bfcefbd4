"""Every store keeps the same promises: whole files, exact names, and nothing left of a writer that raises."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile

from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.local import is_of_this_process, is_on_local_disk, temporary_name, type_of_mount
from lightning_faulttolerant.storage.store import (
    create_file,
    is_url,
    local_copy,
    open_file,
    open_store,
    open_writer,
    split_path,
)
from tests.messages import error_of, plain
from tests.storage.stores import MIB, read, write


def test_store_lists_renames_and_deletes(any_url):
    """Files and folders are listed as they are now, a file can be moved into a folder, and nothing is left behind."""
    store = open_store(any_url)
    assert store.names() == []
    write(any_url, "b", b"1234")
    write(any_url, "a/c", b"5")
    assert store.names() == ["a", "b"]
    assert (store.listing().files, store.listing().folders) == (["b"], ["a"])
    assert store.size("b") == 4
    store.rename("b", "a/b")
    assert (store.names(), store.folder("a").names(), store.tree()) == (["a"], ["b", "c"], ["a/b", "a/c"])
    assert read(store.folder("a").path("b")) == read(store.path("a/b")) == b"1234"
    for name in ("a", "missing"):
        store.folder(name).remove_if_empty()
    assert store.tree() == ["a/b", "a/c"]
    for name in ("b", "c"):
        store.folder("a").delete(name)
    store.folder("a").remove_if_empty()
    assert store.names() == []
    for look in (open_file, local_copy, lambda _: store.size("missing")):
        with pytest.raises(FileNotFoundError) as caught:
            look(store.path("missing"))
        assert caught.value.errno == 2


def test_name_that_looks_like_a_pattern_is_a_name(any_url):
    """Brackets, stars and spaces in names, as in names with metrics, have no special meaning."""
    store = open_store(f"{any_url}/val[1]*")
    for content in (b"old", b"new"):
        write(store.url, "loss[a] *.ckpt", content)
    assert (store.names(), read(store.path("loss[a] *.ckpt"))) == (["loss[a] *.ckpt"], b"new")
    store.rename("loss[a] *.ckpt", "folder[1]/b*")
    assert (store.listing().files, store.folder("folder[1]").names()) == ([], ["b*"])
    with local_copy(store.path("folder[1]/b*")) as file:
        assert file.read() == b"new"
    store.folder("folder[1]").delete("b*")
    assert store.folder("folder[1]").names() == []


def test_file_is_created_once(remote_url):
    """Of two processes that create a file, the second is refused, and the first one's content stays."""
    create_file(f"{remote_url}/a", b"first")
    error_of(FileExistsError, lambda: create_file(f"{remote_url}/a", b"second"))
    assert read(f"{remote_url}/a") == b"first"


def _write_and_raise(url, name, num_bytes, error):
    with open_store(url).writer(name) as file:
        file.write(bytes(num_bytes))
        raise error


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB - 1, 5 * MIB, 11 * MIB])
def test_file_of_any_size_is_whole_and_replaces_the_old_one_at_once(any_url, num_bytes, small_parts):
    """Readers get the whole old file while a new one is written, also if that fails; all ways of reading agree."""
    store, content = open_store(any_url), os.urandom(num_bytes)
    path = store.path("a")
    write(any_url, "a", b"old")
    for error in (KeyboardInterrupt, SystemExit, ValueError):
        error_of(error, lambda error=error: _write_and_raise(any_url, "a", num_bytes, error))
        assert (store.names(), read(path)) == (["a"], b"old")
    with open_writer(path) as file:
        file.write(content[: num_bytes // 2])
        file.write(content[num_bytes // 2 :])
        assert read(path) == b"old"
    assert read(path) == content
    with local_copy(path) as copy, open_file(path, whole=True) as whole:
        assert copy.read() == whole.read() == content
    assert (store.size("a"), store.names()) == (num_bytes, ["a"])


class BucketOfGoogles(MemoryFileSystem):
    """Treats files as gcsfs does: they are invisible before `commit`, and `info` has an MD5."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path):
        return f"/{path.removeprefix('gs://').strip('/')}"

    def _open(self, path, mode="rb", **options):
        return super()._open(path, mode) if mode == "rb" else ResumableUpload(self, path, mode, autocommit=False)

    def info(self, path, **options):
        info = super().info(path, **options)
        content = self.store[info["name"]].getvalue() if info["type"] == "file" else b""
        return {**info, "md5Hash": base64.b64encode(hashlib.md5(content).digest()).decode()}


class ResumableUpload(AbstractBufferedFile):
    """An upload to a bucket of Google's; that of a file named "damaged" arrives with another last byte."""

    def _initiate_upload(self):
        self.sent = b""

    def _upload_chunk(self, final=False):
        self.sent += self.buffer.getvalue()
        return True

    def commit(self):
        content = self.sent[:-1] + b"?" if self.path.endswith("damaged") else self.sent
        self.fs.store[self.path] = MemoryFile(self.fs, self.path, content)

    def discard(self):
        """Forget the file."""


def test_file_for_google_is_committed_and_compared_by_its_md5(monkeypatch):
    """A Google bucket gets a file whole or not at all, and a file with another MD5 is set aside."""
    monkeypatch.setitem(_registry, "gs", BucketOfGoogles)
    google, content = "gs://bucket/run", os.urandom(12 * MIB)
    write(google, "a", content)
    error_of(KeyboardInterrupt, lambda: _write_and_raise(google, "a", 12 * MIB, KeyboardInterrupt))
    assert read(f"{google}/a") == content
    assert "its MD5 is" in error_of(DamagedCheckpointError, lambda: write(google, "damaged", bytes(100)))
    assert open_store(google).names() == ["a", "damaged.damaged"]


def test_urls_that_can_not_be_opened(monkeypatch, snapshot):
    """A missing client is named with what to install, and an unknown kind of URL is not taken for a directory."""
    monkeypatch.setitem(sys.modules, "ossfs", None)
    said = [error_of(CheckpointError, open_store(url).names) for url in ("oss://bucket/run", "nothing://bucket")]
    assert plain("\n".join(said)) == snapshot


def test_paths_and_urls_are_told_apart(tmp_path, monkeypatch):
    """file:// is local, a relative path is made absolute once, and a URL stays as it was written."""
    monkeypatch.chdir(tmp_path)
    asked = [is_url(path) for path in ("file:///data", "simplecache::s3://bucket", "data::v2/train")]
    assert asked == [False, True, False]
    assert open_store("file:///data/run").path("a") == "/data/run/a"
    assert open_store("run").url == str(tmp_path / "run")
    assert open_store("s3://bucket/run/").path("a") == "s3://bucket/run/a"
    assert split_path("file:///data/a.ckpt") == ("/data", "a.ckpt")


NO_CLIENT = """
import sys
from lightning_faulttolerant.checkpoint import series
from lightning_faulttolerant.storage.lock import open_lock
series.open_store("run").names()
print([name for name in ("s3fs", "gcsfs", "botocore", "lightning_faulttolerant.storage.remote")
       if name in sys.modules])
"""


@pytest.mark.slow
def test_local_files_need_no_client():
    """Work on local files does not wait for the import of unneeded clients."""
    done = subprocess.run([sys.executable, "-c", NO_CLIENT], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


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
TYPES = {"ext4": "27 36 70", "nfs4": "41", "btrfs": "52", "fuse.s3fs": "60", "tmpfs": "61", "overlay": "62"}
TYPES |= {"cifs": "63", "xfs": "6", "": "80 81 82 83 64 1"}  # the last are not understood, or not there


def test_disk_is_local_if_its_mount_is_of_a_known_type(tmp_path):
    """The mount is found whatever its paths contain; memory is local, but no special file system, nor what is gone."""
    for kind, mounts in TYPES.items():
        assert {type_of_mount(mount_id, MOUNTS) for mount_id in mounts.split()} == {kind}
    assert type_of_mount("", MOUNTS) == ""
    assert is_on_local_disk("/dev/shm") == Path("/dev/shm").is_dir()
    assert not is_on_local_disk("/proc")
    assert not is_on_local_disk(str(tmp_path / "missing"))


def test_no_temporary_name_comes_twice(monkeypatch):
    """Names differ within a process and from those of its forks, even by their end, and cost one call of the system."""
    names = [temporary_name("a.ckpt") for _ in range(50)]
    with monkeypatch.context() as patch:
        patch.delattr("secrets.token_hex")
        patch.delattr("secrets.randbits")
        names += [temporary_name("a.ckpt") for _ in range(50)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        of_forks = pool.map(temporary_name, ["a.ckpt"] * 100)
    tails = {name.rpartition("-")[2] for name in (*names, *of_forks)}  # without the process id
    assert len({*names, *of_forks}) == len(tails) == 200
    assert all(is_of_this_process(name) for name in names)
    assert not any(is_of_this_process(name) for name in of_forks)
