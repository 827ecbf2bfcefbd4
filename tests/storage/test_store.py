"""Every store keeps the same promises: whole files, exact names, and nothing left of a writer that raises."""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.store import (
    create_file,
    is_url,
    local_copy,
    open_file,
    open_store,
    open_writer,
    split_path,
)
from tests.messages import plain
from tests.storage.stores import MIB, error_of, read, write


def test_store_lists_renames_and_deletes(any_url: str) -> None:
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


def test_name_that_looks_like_a_pattern_is_a_name(any_url: str) -> None:
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


def test_missing_file_is_not_found(any_url: str) -> None:
    """In every store, a missing file is a FileNotFoundError with its number."""
    path = open_store(any_url).path("missing")
    for look in (open_file, local_copy, lambda _: open_store(any_url).size("missing")):
        with pytest.raises(FileNotFoundError) as caught:
            look(path)
        assert caught.value.errno == 2


def test_file_is_created_once(remote_url: str) -> None:
    """Of two processes that create a file, the second is refused, and the first one's content stays."""
    create_file(f"{remote_url}/a", b"first")
    error_of(FileExistsError, lambda: create_file(f"{remote_url}/a", b"second"))
    assert read(f"{remote_url}/a") == b"first"


@pytest.mark.parametrize(("error", "num_bytes"), [(KeyboardInterrupt, 10), (SystemExit, 12 * MIB), (ValueError, 10)])
def test_file_whose_writer_raises_is_never_published(
    any_url: str, error: type[BaseException], num_bytes: int, small_parts: int
) -> None:
    """An exception of any kind, at any size, leaves the old file unchanged, and nothing of the new one."""
    store = open_store(any_url)
    write(any_url, "a", b"old")

    def fail() -> None:
        with store.writer("a") as file:
            file.write(bytes(num_bytes))
            raise error

    error_of(error, fail)
    assert store.names() == ["a"]
    assert read(store.path("a")) == b"old"


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB - 1, 5 * MIB, 11 * MIB])
def test_file_of_any_size_is_whole_and_replaces_the_old_one_at_once(
    any_url: str, num_bytes: int, small_parts: int
) -> None:
    """Readers get the whole old file while a new one is written, and all ways of reading return the new one then."""
    content = os.urandom(num_bytes)
    write(any_url, "a", b"old")
    path = open_store(any_url).path("a")
    with open_writer(path) as file:
        file.write(content[: num_bytes // 2])
        file.write(content[num_bytes // 2 :])
        assert read(path) == b"old"
    assert read(path) == content
    with local_copy(path) as copy, open_file(path, whole=True) as whole:
        assert copy.read() == whole.read() == content
    assert open_store(any_url).size("a") == num_bytes
    assert open_store(any_url).names() == ["a"]


class BucketOfGoogles(MemoryFileSystem):
    """Treats files as gcsfs does: they are invisible before `commit`, and `info` has an MD5."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return f"/{path.removeprefix('gs://').strip('/')}"

    def _open(self, path: str, mode: str = "rb", autocommit: bool = True, **options: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, **options)
        assert not autocommit
        return ResumableUpload(self, path, mode, autocommit=False)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        info = super().info(path, **options)
        if info["type"] == "file":
            digest = hashlib.md5(self.store[self._strip_protocol(path)].getvalue()).digest()
            info["md5Hash"] = base64.b64encode(digest).decode()
        return info


class ResumableUpload(AbstractBufferedFile):
    """An upload to a bucket of Google's; a file named "damaged" arrives with another first byte, "short" with one."""

    def _initiate_upload(self) -> None:
        self.sent = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        return True

    def commit(self) -> None:
        changed = {"damaged": b"\1" + self.sent[1:], "short": self.sent[:1]}
        content = changed.get(self.path.rpartition("/")[2], self.sent)
        self.fs.store[self.path] = MemoryFile(self.fs, self.path, content)

    def discard(self) -> None:
        self.sent = b""


@pytest.fixture
def google() -> Iterator[str]:
    """The URL of a bucket of Google's."""
    before = _registry.pop("gs", None)
    fsspec.register_implementation("gs", BucketOfGoogles, clobber=True)
    yield "gs://bucket/run"
    _registry.pop("gs")
    if before is not None:
        fsspec.register_implementation("gs", before, clobber=True)


def test_file_for_google_is_committed_and_compared_by_its_md5(google: str) -> None:
    """A Google bucket gets a file whole or not at all, and a file with another MD5 is set aside."""
    content = os.urandom(12 * MIB)
    write(google, "a", content)
    assert read(f"{google}/a") == content

    def fail() -> None:
        with open_store(google).writer("a") as file:
            file.write(bytes(12 * MIB))
            raise KeyboardInterrupt

    error_of(KeyboardInterrupt, fail)
    assert read(f"{google}/a") == content
    assert "its MD5 is" in error_of(DamagedCheckpointError, lambda: write(google, "damaged", bytes(100)))
    assert "it has 1 bytes, but 100 were sent" in error_of(
        DamagedCheckpointError, lambda: write(google, "short", bytes(100))
    )
    assert open_store(google).names() == ["a", "damaged.damaged", "short.damaged"]


def test_urls_that_can_not_be_opened(monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion) -> None:
    """A missing client is named with what to install, and an unknown kind of URL is not taken for a directory."""
    monkeypatch.setitem(sys.modules, "ossfs", None)
    said = [error_of(CheckpointError, open_store(url).names) for url in ("oss://bucket/run", "nothing://bucket")]
    assert plain("\n".join(said)) == snapshot


def test_paths_and_urls_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """file:// is local, a relative path is made absolute once, and a URL stays as it was written."""
    monkeypatch.chdir(tmp_path)
    assert not is_url("file:///data")
    assert is_url("simplecache::s3://bucket")
    assert not is_url("data::v2/train")
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
def test_local_files_need_no_client() -> None:
    """Work on local files does not wait for the import of unneeded clients."""
    done = subprocess.run([sys.executable, "-c", NO_CLIENT], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
