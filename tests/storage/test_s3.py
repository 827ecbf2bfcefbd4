"""What an object store promises beyond other stores: checked uploads, no lost parts, no stale listings."""

import contextlib
import os
import random

import fsspec.config
import pytest

from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.storage.store import local_copy, open_store
from tests.messages import error_of
from tests.processes import run
from tests.s3 import PAGE, client
from tests.storage.stores import MIB, damaging, read, requests_to_s3, write


@pytest.fixture
def bucket(s3, s3_endpoint):
    """Return a function that yields the bucket's answers to an independent client."""
    plain = client(s3_endpoint)
    return lambda method, **arguments: getattr(plain, method)(Bucket=s3.removeprefix("s3://"), **arguments)


@pytest.mark.parametrize("raises", [False, True])
def test_parts_are_sent_while_the_file_is_written(s3, bucket, small_parts, raises):
    """A large file is never in memory as a whole; parts of a writer that raises are dropped: they cost money."""

    def send():
        with open_store(s3).writer("run/a") as file:
            file.write(bytes(12 * MIB))
            [upload] = bucket("list_multipart_uploads")["Uploads"]
            parts = bucket("list_parts", Key="run/a", UploadId=upload["UploadId"])["Parts"]
            assert [part["Size"] for part in parts] == [small_parts, small_parts]
            if raises:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if raises else contextlib.nullcontext():
        send()
    assert "Uploads" not in bucket("list_multipart_uploads")
    assert raises or bucket("head_object", Key="run/a")["ETag"].endswith('-3"')


def test_file_that_another_writer_puts_in_the_place_of_ours_is_no_damage(s3, bucket, monkeypatch):
    """Neither of two writers of one URL takes the other's file for its own, damaged, and moves it away."""

    def put_theirs(method, answer):
        if method == "put_object":
            bucket("put_object", Key="run/a", Body=b"theirs")

    with requests_to_s3(monkeypatch, after=put_theirs):
        write(f"{s3}/run", "a", b"ours, of another length")
    assert open_store(f"{s3}/run").names() == ["a"]
    assert read(f"{s3}/run/a") == b"theirs"


FLIPPED, SHORT = damaging(lambda data: b"\1" + data[1:]), damaging(lambda data: data[:-1])


@pytest.mark.parametrize("num_bytes", [100, 6 * MIB])
@pytest.mark.parametrize("damage", [FLIPPED, SHORT], ids=["flipped", "short"])
def test_upload_that_arrives_damaged_is_set_aside(s3, monkeypatch, num_bytes, damage, small_parts):
    """A byte that changes in transit is found by size or ETag, and the file is not available under its name."""
    with requests_to_s3(monkeypatch, damage):
        said = error_of(DamagedCheckpointError, lambda: write(f"{s3}/run", "a", bytes(num_bytes)))
    assert "did not arrive as it was sent" in said
    assert f"{s3}/run/a.damaged" in said
    assert open_store(f"{s3}/run").names() == ["a.damaged"]


@pytest.mark.parametrize("is_published", [True, False])
def test_commit_whose_answer_is_lost_is_found_out(s3, monkeypatch, is_published, small_parts):
    """A repeated commit that finds no upload either worked the first time or failed: the store's content decides."""

    def lose(method, _):
        if method == "complete_multipart_upload":
            raise FileNotFoundError("The specified upload does not exist")

    write(s3, "a", b"old")
    content = os.urandom(6 * MIB)
    with (
        requests_to_s3(monkeypatch, **{"after" if is_published else "before": lose}),
        contextlib.nullcontext() if is_published else pytest.raises(FileNotFoundError, match="upload does not exist"),
    ):
        write(s3, "a", content)
    assert read(f"{s3}/a") == (content if is_published else b"old")


def other_etag(method, answer):
    """Let a store answer with ETags that are no MD5 of the content."""
    if "ETag" in answer and method != "get_object":
        answer["ETag"] = f'"{"0" * 32}"'


def test_upload_is_verified_by_what_the_store_says_of_it(s3, monkeypatch, small_parts):
    """It is not read back, but once where ETags are other sums: then sizes are enough. Of KMS, they always are."""
    with requests_to_s3(monkeypatch) as requests:
        write(s3, "small", bytes(100))
        write(s3, "large", bytes(6 * MIB))
    methods = [method for method, _ in requests]
    assert (methods.count("head_object"), methods.count("get_object")) == (2, 0)
    assert methods[:2] == ["put_object", "head_object"], "a small file is one request"
    encrypted = {**fsspec.config.conf["s3"], "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}}
    with monkeypatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", encrypted)
        with requests_to_s3(monkeypatch, after=other_etag) as requests:
            write(s3, "a", b"1234")
        assert "get_object" not in [method for method, _ in requests]
        with requests_to_s3(monkeypatch, SHORT, other_etag):
            said = error_of(DamagedCheckpointError, lambda: write(s3, "a", b"1234"))
        assert "it has 3 bytes, but 4 were sent" in said
    with requests_to_s3(monkeypatch, lambda _, arguments: arguments.pop("IfMatch", None), other_etag) as requests:
        write(s3, "a", b"1234")
        write(s3, "b", b"1234")
    assert [method for method, _ in requests].count("get_object") == 1


def _copied(path):
    with local_copy(path) as file:
        return file.read()


LOOKS = {
    "names": (lambda store: store.names(), ["a", "b"]),
    "size": (lambda store: store.size("a"), 3),
    "open_file": (lambda store: read(store.path("a")), b"234"),
    "local_copy": (lambda store: _copied(store.path("a")), b"234"),
}


@pytest.mark.parametrize(("look", "expected"), LOOKS.values(), ids=LOOKS)
def test_nothing_is_believed_that_was_listed_before(s3, bucket, look, expected):
    """Other machines' writes, replacements and deletions are seen immediately, whatever was listed before."""
    write(f"{s3}/run", "a", b"1")
    fs, path = fsspec.core.url_to_fs(f"{s3}/run")
    assert open_store(f"{s3}/run").names() == ["a"]
    fs.ls(path)
    bucket("put_object", Key="run/a", Body=b"234")
    bucket("put_object", Key="run/b", Body=b"5")
    assert fs.ls(path) == [f"{path}/a"], "fsspec remembers: the test can see something"
    assert look(open_store(f"{s3}/run")) == expected
    for key in ("run/a", "run/b"):
        bucket("delete_object", Key=key)
    if isinstance(expected, list):
        assert look(open_store(f"{s3}/run")) == []
    else:
        error_of(FileNotFoundError, lambda: look(open_store(f"{s3}/run")))


def test_only_what_begins_with_the_url_is_listed(s3, bucket, monkeypatch):
    """Among thousands of others, a directory is listed by its prefix, page by page. What stands for it is no file."""
    names = [f"{number:04d}" for number in range(PAGE + 1)]
    for folder, some in (("run/", names), ("runs/", names[:9]), ("", names[:9])):
        for name in some:
            bucket("put_object", Key=f"{folder}{name}", Body=b"")
    with requests_to_s3(monkeypatch) as requests:
        assert open_store(f"{s3}/run").names() == names
        assert open_store(f"{s3}/missing").names() == []
    prefixes = [(method, arguments["Prefix"]) for method, arguments in requests]
    assert prefixes == [("list_objects_v2", f"{name}/") for name in ("run", "run", "missing")]
    for key in ("folder/", "folder/fit-1/"):  # as consoles do
        bucket("put_object", Key=key, Body=b"")
    assert [open_store(f"{s3}/{name}").names() for name in ("folder", "folder/fit-1")] == [["fit-1"], []]


def test_only_our_own_unfinished_uploads_are_dropped(s3, bucket):
    """Killed writers' unfinished uploads below the URL go, and all others stay, however similar their names are."""
    for key in ("run/a", "run/fit-1/b", "run", "runs/c", "other/run/d"):
        bucket("create_multipart_upload", Key=key)
    open_store(f"{s3}/run").abort_uploads()
    keys = [upload["Key"] for upload in bucket("list_multipart_uploads")["Uploads"]]
    assert sorted(keys) == ["other/run/d", "run", "runs/c"]


def test_retries_draw_nothing_from_the_run(s3, monkeypatch):
    """Retries draw their waiting time without moving the global generator, even if the network fails."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://localhost:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")

    def main():
        before = random.getstate()
        with pytest.raises(OSError, match="EndpointConnectionError") as caught:
            open_store(f"{s3}/run").names()
        assert caught.value.errno is not None
        assert random.getstate() == before

    assert run(main).exit_code == 0
