"""Every store keeps the same promises, and an object store some more."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec.config
import pytest
import s3fs
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from lightning_faulttolerant.checkpoint.verify import verify_path
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage import file_systems, remote
from lightning_faulttolerant.storage.file_systems import file_system
from lightning_faulttolerant.storage.store import is_url, local_copy, open_file, open_store, open_writer, split_path
from tests.s3 import PAGE, client
from tests.storage.stores import calls_of_s3, damage_what_is_not_sent_yet, read, write

MIB = 1024 * 1024


@pytest.fixture
def bucket(s3: str, s3_endpoint: str) -> Callable[..., Any]:
    """Return a function that yields the bucket's answers to an independent client."""
    plain = client(s3_endpoint)
    return lambda method, **arguments: getattr(plain, method)(Bucket=s3.removeprefix("s3://"), **arguments)


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
    assert (store.names(), store.folder("a").names()) == (["a"], ["b", "c"])
    assert read(store.folder("a").path("b")) == read(store.path("a/b")) == b"1234"
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


def test_directory_with_files_is_not_removed(any_url: str) -> None:
    """Removing a directory if it is empty must keep one that is not, and accept one that is missing."""
    write(any_url, "a", b"1")
    open_store(any_url).remove_if_empty()
    open_store(any_url).folder("missing").remove_if_empty()
    assert read(open_store(any_url).path("a")) == b"1"


def test_missing_file_is_not_found(any_url: str) -> None:
    """In every store, a missing file is a FileNotFoundError with its number."""
    path = open_store(any_url).path("missing")
    for look in (open_file, local_copy, lambda _: open_store(any_url).size("missing")):
        with pytest.raises(FileNotFoundError) as caught:
            look(path)
        assert caught.value.errno == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
@pytest.mark.parametrize("num_bytes", [10, 12 * MIB])
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

    with pytest.raises(error):
        fail()
    assert store.names() == ["a"]
    assert read(store.path("a")) == b"old"


def test_file_is_the_old_one_until_its_writer_is_done(any_url: str, small_parts: int) -> None:
    """A reader gets the whole old file while a new one is written."""
    store = open_store(any_url)
    write(any_url, "a", b"old")
    content = os.urandom(11 * MIB)
    with store.writer("a") as file:
        file.write(content)
        assert read(store.path("a")) == b"old"
    assert read(store.path("a")) == content
    assert store.names() == ["a"]


@pytest.mark.parametrize("num_bytes", [0, 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 10 * MIB])
def test_file_of_any_size_is_whole(any_url: str, num_bytes: int, small_parts: int) -> None:
    """At the part boundaries too, a file has the written content, and both ways of reading return it."""
    content = os.urandom(num_bytes)
    with open_writer(open_store(any_url).path("a") if is_url(any_url) else _made(any_url)) as file:
        file.write(content[: num_bytes // 2])
        file.write(content[num_bytes // 2 :])
    path = open_store(any_url).path("a")
    assert read(path) == content
    with local_copy(path) as copy:
        assert copy.read() == content
    assert open_store(any_url).size("a") == num_bytes


def _made(directory: str) -> str:
    os.makedirs(directory)
    return f"{directory}/a"


def test_parts_are_sent_while_the_file_is_written(s3: str, bucket: Callable[..., Any], small_parts: int) -> None:
    """A large file is never in memory as a whole: its parts are sent as soon as they are full, all of one size."""
    with open_store(s3).writer("run/a") as file:
        file.write(bytes(12 * MIB))
        [upload] = bucket("list_multipart_uploads")["Uploads"]
        parts = bucket("list_parts", Key="run/a", UploadId=upload["UploadId"])["Parts"]
        assert [part["Size"] for part in parts] == [small_parts, small_parts]
    assert "Uploads" not in bucket("list_multipart_uploads")
    assert bucket("head_object", Key="run/a")["ETag"].endswith('-3"')


def test_upload_that_raises_leaves_no_parts(s3: str, bucket: Callable[..., Any], small_parts: int) -> None:
    """Parts that were sent are dropped: they are invisible and cost money."""

    def fail() -> None:
        with open_store(s3).writer("a") as file:
            file.write(bytes(6 * MIB))
            assert len(bucket("list_multipart_uploads")["Uploads"]) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "Uploads" not in bucket("list_multipart_uploads")


def test_file_that_another_writer_puts_in_the_place_of_ours_is_no_damage(
    s3: str, bucket: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither of two writers of one URL may take the other's file for its own, damaged, and move it away."""
    real = file_systems._S3Upload.publish

    def publish_first(self: Any) -> None:
        real(self)
        bucket("put_object", Key="run/a", Body=b"theirs")

    monkeypatch.setattr(file_systems._S3Upload, "publish", publish_first)
    write(f"{s3}/run", "a", b"ours, of another length")
    assert open_store(f"{s3}/run").names() == ["a"]
    assert read(f"{s3}/run/a") == b"theirs"


@pytest.mark.parametrize("num_bytes", [100, 6 * MIB])
@pytest.mark.parametrize("damage", [lambda data: b"\1" + data[1:], lambda data: data[:-1]], ids=["flipped", "short"])
def test_upload_that_arrives_damaged_is_set_aside(
    s3: str, bucket: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_bytes: int, damage: Any, small_parts: int
) -> None:
    """A byte that changes in transit is found by size or ETag, and the file is not available under its name."""
    real = file_systems._S3Upload.publish

    def publish_damaged(self: Any) -> None:
        damage_what_is_not_sent_yet(self, damage)
        real(self)

    monkeypatch.setattr(file_systems._S3Upload, "publish", publish_damaged)
    with pytest.raises(DamagedCheckpointError, match=r"did not arrive as it was sent.*s3://.*/run/a\.damaged"):
        write(f"{s3}/run", "a", bytes(num_bytes))
    assert open_store(f"{s3}/run").names() == ["a.damaged"]


def test_damage_is_found_where_there_are_only_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without checksums still has sizes: a file that lost bytes is not published."""
    url = "memory://damage-of-memory/run"
    store = open_store(url)
    write(url, "a", b"old")
    real = file_systems._MovedUpload.write
    monkeypatch.setattr(
        file_systems._MovedUpload, "write", lambda self, piece: (real(self, piece), self._file.truncate(3))
    )
    with pytest.raises(OSError, match="3 bytes, but 10 were sent"):
        write(url, "a", bytes(10))
    assert store.names() == ["a"]
    assert read(store.path("a")) == b"old"


@pytest.mark.parametrize("is_published", [True, False])
def test_commit_whose_answer_is_lost_is_found_out(
    s3: str, monkeypatch: pytest.MonkeyPatch, is_published: bool, small_parts: int
) -> None:
    """A repeated commit that finds no upload either worked the first time or failed: the store's content decides."""
    real = s3fs.core.S3File.commit

    def commit_twice(self: Any) -> None:
        if is_published:
            real(self)
        raise FileNotFoundError("The specified upload does not exist")

    write(s3, "a", b"old")
    content = os.urandom(6 * MIB)
    monkeypatch.setattr(s3fs.core.S3File, "commit", commit_twice)
    with contextlib.nullcontext() if is_published else pytest.raises(FileNotFoundError, match="upload does not exist"):
        write(s3, "a", content)
    assert read(f"{s3}/a") == (content if is_published else b"old")


class BucketOfGoogles(MemoryFileSystem):
    """Treats files as gcsfs does: they are invisible before `commit`, and `info` has an MD5."""

    protocol = ("gs", "gcs")
    store: ClassVar[dict[str, Any]] = {}

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
    def _initiate_upload(self) -> None:
        self.sent = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += self.buffer.getvalue()
        return True

    def commit(self) -> None:
        self.fs.pipe_file_whole(self.path, self.sent)

    def discard(self) -> None:
        self.sent = b""


def test_file_for_google_is_committed_and_compared_by_its_md5(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Google bucket gets a file whole or not at all, and a file with another MD5 is set aside."""
    fs = BucketOfGoogles()
    damage = [lambda data: data]
    monkeypatch.setattr(
        BucketOfGoogles,
        "pipe_file_whole",
        lambda self, path, data: self.store.update({path: MemoryFile(self, path, damage[0](data))}),
        raising=False,
    )
    monkeypatch.setattr(remote, "file_system", lambda url: (fs, f"/{url.partition('://')[2]}"))
    content = os.urandom(12 * MIB)
    write("gs://bucket/run", "a", content)
    assert fs.cat_file("/bucket/run/a") == content

    def fail() -> None:
        with open_store("gs://bucket/run").writer("a") as file:
            file.write(bytes(12 * MIB))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert fs.cat_file("/bucket/run/a") == content
    damage[0] = lambda data: b"\1" + data[1:]
    with pytest.raises(DamagedCheckpointError, match="its MD5 is"):
        write("gs://bucket/run", "b", bytes(100))
    assert open_store("gs://bucket/run").names() == ["a", "b.damaged"]


def test_upload_is_verified_without_reading_it(s3: str, monkeypatch: pytest.MonkeyPatch, small_parts: int) -> None:
    """The store's own information about the file is compared; the file is not transferred back."""
    with calls_of_s3(monkeypatch) as calls:
        write(s3, "small", bytes(100))
        write(s3, "large", bytes(6 * MIB))
    methods = [method for method, _ in calls]
    assert methods.count("head_object") == 2
    assert "get_object" not in methods
    assert methods[:2] == ["put_object", "head_object"], "a small file is one request"


def test_etags_that_are_no_md5_are_not_taken_for_damage(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If ETags are other sums, a file is read back once and found right; then sizes are enough for the bucket."""
    monkeypatch.setattr(file_systems, "_buckets_without_md5", set())
    monkeypatch.setattr(file_systems._PartDigests, "etag", lambda self, *, is_multipart: "0" * 32)
    with calls_of_s3(monkeypatch) as calls:
        write(s3, "a", b"1234")
        write(s3, "b", b"1234")
    assert [method for method, _ in calls].count("get_object") == 1


def test_etags_of_encrypted_objects_are_not_compared(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is encrypted with a KMS key has an ETag that is not an MD5: only its size is compared."""
    monkeypatch.setattr(file_systems, "_buckets_without_md5", set())
    monkeypatch.setattr(file_systems._PartDigests, "etag", lambda self, *, is_multipart: "0" * 32)
    options = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    with calls_of_s3(monkeypatch) as calls:
        write(s3, "a", b"1234")
    assert "get_object" not in [method for method, _ in calls]


def test_encrypted_object_that_lost_bytes_is_set_aside(
    s3: str, bucket: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the ETag says nothing, the size still does."""
    monkeypatch.setattr(file_systems._PartDigests, "etag", lambda self, *, is_multipart: "0" * 32)
    monkeypatch.setitem(fsspec.config.conf, "s3", {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}})
    real = file_systems._S3Upload.publish

    def publish_damaged(self: Any) -> None:
        damage_what_is_not_sent_yet(self, lambda data: data[:3])
        real(self)

    monkeypatch.setattr(file_systems._S3Upload, "publish", publish_damaged)
    with pytest.raises(DamagedCheckpointError, match="it has 3 bytes, but 4 were sent"):
        write(s3, "a", b"1234")


def test_object_that_stands_for_a_folder_is_no_file(s3: str, bucket: Callable[..., Any]) -> None:
    """Consoles create an empty object "run/" for a folder: it is not a file without a name."""
    bucket("put_object", Key="run/", Body=b"")
    bucket("put_object", Key="run/fit-1/", Body=b"")
    assert open_store(f"{s3}/run").names() == ["fit-1"]
    assert open_store(f"{s3}/run/fit-1").names() == []


def _copied(path: str) -> bytes:
    with local_copy(path) as file:
        return file.read()


@pytest.mark.parametrize(
    ("look", "expected"),
    [
        (lambda store: store.names(), ["a", "b"]),
        (lambda store: store.size("a"), 3),
        (lambda store: read(store.path("a")), b"234"),
        (lambda store: _copied(store.path("a")), b"234"),
    ],
    ids=["names", "size", "open_file", "local_copy"],
)
def test_nothing_is_believed_that_was_listed_before(
    s3: str, bucket: Callable[..., Any], look: Callable[[Any], Any], expected: Any
) -> None:
    """Other machines' writes, replacements and deletions are seen immediately, whatever was listed before."""
    write(f"{s3}/run", "a", b"1")
    fs, path = file_system(f"{s3}/run")
    assert fs.ls(path) == [f"{path}/a"]
    bucket("put_object", Key="run/a", Body=b"234")
    bucket("put_object", Key="run/b", Body=b"5")
    assert fs.ls(path) == [f"{path}/a"], "fsspec remembers: the test can see something"
    assert look(open_store(f"{s3}/run")) == expected
    assert fs.ls(path, refresh=True) == [f"{path}/a", f"{path}/b"]
    for key in ("run/a", "run/b"):
        bucket("delete_object", Key=key)
    if isinstance(expected, list):
        assert look(open_store(f"{s3}/run")) == []
    else:
        with pytest.raises(FileNotFoundError):
            look(open_store(f"{s3}/run"))


@pytest.mark.parametrize("num_objects", [PAGE + 1, pytest.param(1_000, marks=pytest.mark.slow)])
def test_only_what_begins_with_the_url_is_listed(
    s3: str, bucket: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, num_objects: int
) -> None:
    """Among thousands of other objects, a directory is listed by its prefix, page by page, and nothing else is."""
    names = [f"{number:04d}" for number in range(num_objects)]
    for name in names:
        for folder in ("run/", "runs/", ""):
            bucket("put_object", Key=f"{folder}{name}", Body=b"")
    with calls_of_s3(monkeypatch) as calls:
        assert open_store(f"{s3}/run").names() == names
        assert open_store(f"{s3}/missing").names() == []
    num_pages = -(-num_objects // PAGE)
    prefixes = [(method, arguments["Prefix"]) for method, arguments in calls]
    assert prefixes == [("list_objects_v2", "run/")] * num_pages + [("list_objects_v2", "missing/")]


def test_only_our_own_unfinished_uploads_are_dropped(s3: str, bucket: Callable[..., Any]) -> None:
    """Killed writers' unfinished uploads below the URL go, and all others stay, however similar their names are."""
    for key in ("run/a", "run/fit-1/b", "run", "runs/c", "other/run/d"):
        bucket("create_multipart_upload", Key=key)
    open_store(f"{s3}/run").abort_uploads()
    keys = [upload["Key"] for upload in bucket("list_multipart_uploads")["Uploads"]]
    assert sorted(keys) == ["other/run/d", "run", "runs/c"]


def test_only_what_is_read_is_transferred(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking into a large file transfers only the blocks that are read."""
    write(s3, "a", bytes(8 * MIB) + b"end")
    with calls_of_s3(monkeypatch) as calls, open_file(f"{s3}/a") as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"end"
        file.seek(0)
        assert file.read(1) == b"\0"
    ranges = [arguments["Range"] for method, arguments in calls if method == "get_object"]
    assert ranges == [f"bytes={8 * MIB}-{9 * MIB - 1}", f"bytes=0-{MIB - 1}"]


def test_verification_of_a_large_file_takes_few_requests(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is read from end to end comes 8 MiB at a time, each block once, but the last one twice."""
    with open_store(s3).writer("a.ckpt") as file:
        torch.save({"weights": torch.zeros(4 * 8 * MIB, dtype=torch.uint8)}, file)
    with calls_of_s3(monkeypatch) as calls:
        assert verify_path(f"{s3}/a.ckpt").has_checksums
    ranges = [arguments["Range"] for method, arguments in calls if method == "get_object"]
    assert len(ranges) == len(set(ranges)) + 1 == 6


def test_whole_file_is_transferred_once(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local copy is one request for the content, and can be read repeatedly."""
    write(s3, "a", b"1234")
    with calls_of_s3(monkeypatch) as calls, local_copy(f"{s3}/a") as file:
        for _ in range(2):
            file.seek(0)
            assert file.read() == b"1234"
    assert [method for method, _ in calls].count("get_object") == 1


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client of a store isn't installed, the error says what to install."""
    monkeypatch.setitem(sys.modules, "ossfs", None)
    with pytest.raises(CheckpointError, match=r"oss://bucket/run can't be opened.*pip install ossfs"):
        open_store("oss://bucket/run").names()


def test_unknown_kind_of_url_is_refused() -> None:
    """An unknown kind of URL is an error that says so, not a directory of that name."""
    with pytest.raises(CheckpointError, match="nothing://bucket can't be opened: Protocol not known"):
        open_store("nothing://bucket").names()


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


def test_local_files_need_no_client() -> None:
    """Work on local files does not wait for the import of unneeded clients."""
    done = subprocess.run([sys.executable, "-c", NO_CLIENT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


RETRIES = """
import random
from lightning_faulttolerant.storage.store import open_store
before = random.getstate()
try:
    open_store("s3://bucket/run").names()
except OSError as error:
    print(type(error).__name__, "EndpointConnectionError" in str(error), error.errno is not None)
print(random.getstate() == before)
"""


def test_retries_draw_nothing_from_the_run(s3: str) -> None:
    """Retries draw their waiting time without moving the global generator, even if the network fails."""
    environment = {**os.environ, "AWS_ENDPOINT_URL": "http://localhost:9", "AWS_MAX_ATTEMPTS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", RETRIES], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "OSError True True\nTrue\n"
