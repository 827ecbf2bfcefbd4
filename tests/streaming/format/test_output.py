import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lightning_faulttolerant.streaming import JSONWriter, MDSWriter
from lightning_faulttolerant.streaming.format import output
from tests.streaming.format.shards import files, read, write

COLUMNS = {"i": "int"}
SAMPLES = [{"i": i} for i in range(40)]
ADDRESS = "memory://out"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a remote that is empty before and after, with retries that do not wait."""
    monkeypatch.setattr(output.time, "sleep", lambda seconds: None)
    file_system = fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    yield file_system
    MemoryFileSystem.store.clear()


def expected(tmp_path: Path, **options: Any) -> dict[str, bytes]:
    """Return the files of the data set of these tests, written to a directory."""
    return files(write(MDSWriter, tmp_path / "expected", COLUMNS, SAMPLES, size_limit=300, **options))


def uploaded() -> dict[str, bytes]:
    """Return the files on the remote."""
    return {name.removeprefix("/out/"): file.getvalue() for name, file in MemoryFileSystem.store.items()}


@pytest.mark.parametrize("max_workers", [None, 1])
def test_an_address_gets_all_files(tmp_path: Path, remote: Any, max_workers: int | None) -> None:
    """A remote has the files that a directory would have, and no thread is left."""
    before = set(threading.enumerate())
    with MDSWriter(columns=COLUMNS, out=ADDRESS, size_limit=300, compression="zstd", max_workers=max_workers) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    assert uploaded() == expected(tmp_path, compression="zstd")
    assert len(uploaded()) > 3
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("upload")]


@pytest.mark.parametrize("keep_local", [True, False])
def test_a_pair_gets_all_files_here_and_there(tmp_path: Path, remote: Any, keep_local: bool) -> None:
    """Both places have all files; without `keep_local`, the written local files are deleted afterwards, no others."""
    local = tmp_path / "local"
    whole = expected(tmp_path)
    with MDSWriter(columns=COLUMNS, out=(str(local), ADDRESS), keep_local=keep_local, size_limit=300) as writer:
        for sample in SAMPLES:
            writer.write(sample)
        (local / "mine.txt").write_text("mine")
    assert uploaded() == whole
    assert files(local) == {**(whole if keep_local else {}), "mine.txt": b"mine"}


def test_a_directory_that_was_only_on_the_way_is_gone(tmp_path: Path, remote: Any) -> None:
    """For a pair without `keep_local`, no empty directory stays."""
    with JSONWriter(columns=COLUMNS, out=(str(tmp_path / "local"), ADDRESS)) as writer:
        writer.write(SAMPLES[0])
    assert sorted(uploaded()) == ["index.json", "shard.00000.json", "shard.00000.json.meta"]
    assert not (tmp_path / "local").exists()


@pytest.mark.parametrize("form", ["file://{}", "{}"])
def test_a_directory_may_be_the_remote(form: str, tmp_path: Path) -> None:
    """An address on this machine, alone or in a pair, is a directory that is created when it is written to."""
    whole = expected(tmp_path)
    alone, second = tmp_path / "a" / "alone", tmp_path / "b" / "second"
    for out in (form.format(alone), (str(tmp_path / "first"), form.format(second))):
        with MDSWriter(columns=COLUMNS, out=out, size_limit=300) as writer:
            for sample in SAMPLES:
                writer.write(sample)
    assert files(alone) == files(second) == whole
    assert read(second) == SAMPLES


def test_a_remote_that_is_not_empty_is_an_error_unless_it_may_be(tmp_path: Path, remote: Any) -> None:
    """The rule for a directory holds: the existing data set goes, nothing else does."""
    remote.pipe(
        {"/out/index.json": b"old", "/out/shard.00099.mds": b"old", "/out/notes": b"", "/out/x/index.json": b""}
    )
    with pytest.raises(FileExistsError, match=ADDRESS):
        MDSWriter(columns=COLUMNS, out=ADDRESS)
    with MDSWriter(columns=COLUMNS, out=ADDRESS, size_limit=300, exist_ok=True) as writer:
        assert sorted(uploaded()) == ["notes", "x/index.json"]
        for sample in SAMPLES:
            writer.write(sample)
    assert uploaded() == {**expected(tmp_path), "notes": b"", "x/index.json": b""}


class Failing:
    """Lets uploads of some names fail, each a number of times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, num_times: int, error: Exception) -> None:
        self.attempts: list[str] = []
        upload = MemoryFileSystem.pipe_file

        def pipe_file(file_system: Any, path: str, value: bytes, **options: Any) -> None:
            self.attempts.append(path.rpartition("/")[2])
            if path.endswith(name) and self.attempts.count(name) <= num_times:
                raise error
            upload(file_system, path, value, **options)

        monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


@pytest.mark.parametrize("name", ["shard.00001.mds", "index.json"])
def test_an_upload_that_fails_is_tried_again(
    name: str, tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload is tried `retry` times more, and then all files exist as if nothing had happened."""
    failing = Failing(monkeypatch, name, 2, ConnectionError("cut"))
    write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=300, retry=2)
    assert failing.attempts.count(name) == 3
    assert uploaded() == expected(tmp_path)


@pytest.mark.parametrize("name", ["shard.00001.mds", "index.json"])
@pytest.mark.parametrize("error", [ConnectionError("cut"), PermissionError("no")])
def test_an_upload_that_keeps_failing_publishes_nothing(
    name: str, error: Exception, remote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer raises, naming file and attempts; no index or thread remains, and the rest is not tried again."""
    failing = Failing(monkeypatch, name, 99, error)
    num_attempts = 3 if isinstance(error, ConnectionError) else 1
    with pytest.raises(OSError, match=rf"{name} could not be uploaded to {ADDRESS} \(attempt {num_attempts} of 3\)"):
        write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=300, retry=2)
    assert failing.attempts.count(name) == num_attempts
    assert "index.json" not in uploaded()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


def test_an_exception_in_the_block_publishes_nothing_remotely(remote: Any) -> None:
    """Uploads end, and no index is written there either."""
    with pytest.raises(ZeroDivisionError):
        write(MDSWriter, ADDRESS, COLUMNS, (1 / 0 if s["i"] == 30 else s for s in SAMPLES), size_limit=300)
    assert "index.json" not in uploaded()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


def test_the_index_is_uploaded_after_all_shards(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is uploaded last, however long a shard takes."""
    order: list[str] = []
    upload = MemoryFileSystem.pipe_file
    last_begun = threading.Event()

    def slowly(file_system: Any, path: str, value: bytes, **options: Any) -> None:
        name = path.rpartition("/")[2]
        if name == "shard.00000.mds":
            last_begun.wait(0.2)
        upload(file_system, path, value, **options)
        order.append(name)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", slowly)
    write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=300)
    assert len(order) > 3
    assert order[-1] == "index.json"
    assert order[0] != "shard.00000.mds"


def test_a_slow_remote_holds_the_writer_back(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most twice as many shards as threads wait in memory."""
    may_continue, begun = threading.Event(), threading.Semaphore(0)
    upload = MemoryFileSystem.pipe_file

    def stuck(file_system: Any, path: str, value: bytes, **options: Any) -> None:
        begun.release()
        may_continue.wait(20)
        upload(file_system, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", stuck)
    written: list[int] = []

    def produce() -> None:
        with MDSWriter(columns=COLUMNS, out=ADDRESS, size_limit=1, max_workers=1) as writer:
            for sample in SAMPLES:
                writer.write(sample)
                written.append(sample["i"])

    producer = threading.Thread(target=produce)
    producer.start()
    begun.acquire()
    producer.join(0.1)
    num_waiting = len(written)
    may_continue.set()
    producer.join()
    assert num_waiting < 5
    assert len(uploaded()) == 42


def test_progress_is_shown_where_it_is_asked_for(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar counts the uploaded files."""
    shown = io.StringIO()
    monkeypatch.setattr("sys.stderr", shown)
    write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=300, progress_bar=True)
    assert f"{len(uploaded()) - 1}/{len(uploaded()) - 1}" in shown.getvalue()


def test_a_pair_begins_with_a_directory(tmp_path: Path) -> None:
    """Two addresses, or three of anything, are refused."""
    for out in ((ADDRESS, ADDRESS), (str(tmp_path), ADDRESS, ADDRESS)):
        with pytest.raises(ValueError, match="a pair is a local directory and the address to upload to"):
            MDSWriter(columns=COLUMNS, out=out)
