"""What is written is the original's, byte for byte, here or at an address; a data set without its index is none."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import streaming
from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter, merge_index
from tests.foreign import mosaic
from tests.messages import error_of, plain
from tests.processes import in_child
from tests.streaming.shards import files, infos, read, same, write

COLUMNS = {"i": "int", "t": "bytes"}
SAMPLES = [{"i": i, "t": b"t" * (i % 13)} for i in range(100)]
LINE_COLUMNS = {"z": "int", "a": "str", "f": "float"}
LINES = [{"z": i - 5, "a": "ä" * (i % 9), "f": i / 3} for i in range(60)]


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the syncs: the data sets of these tests have many small shards; one test checks that each is synced."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


CUTS: list[tuple[str, dict[str, Any]]] = [
    *(("MDS", {"size_limit": limit}) for limit in (1, "2kb", None, 0)),
    *(("MDS", {"compression": name, "size_limit": 900}) for name in ("gz:3", "zstd:7")),
    ("MDS", {"hashes": ["blake2s", "md5", "xxh3_64"], "compression": "zstd", "size_limit": 900}),
    *((name, {"newline": "\n", "hashes": ["sha1"], "size_limit": 1}) for name in ("JSON", "CSV", "TSV")),
    ("JSON", {"newline": "\r\n", "compression": "zstd:1", "size_limit": 300}),
    ("XSV", {"separator": "||", "size_limit": 300}),
]


@pytest.mark.parametrize(("name", "options"), CUTS, ids=str)
def test_files_are_those_of_the_original_and_samples_come_back(
    name: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All files and the description are the original's, it reads theirs, and another time changes nothing."""
    module = mosaic("streaming.base.format.xsv") if name == "XSV" else mosaic()
    writer, original = getattr(streaming, f"{name}Writer"), getattr(module, f"{name}Writer")
    columns, samples = (COLUMNS, SAMPLES) if name == "MDS" else (LINE_COLUMNS, LINES)
    ours = write(writer, tmp_path / "ours", columns, samples, **options)
    theirs = write(original, tmp_path / "theirs", columns, samples, **options)
    assert sorted(files(ours)) == sorted(files(theirs))
    if options.get("compression") != "gz:3":  # the original's header has the time
        assert files(ours) == files(theirs)
    assert same(read(theirs), samples)
    before = files(ours)
    monkeypatch.setattr("time.time", lambda: 1e9)
    assert files(write(writer, tmp_path / "again", columns, samples, **options)) == before
    one, other = (each(columns=columns, out=str(tmp_path / f"{each}"), **options) for each in (writer, original))
    assert one.get_config() == other.get_config()
    one.finish(), other.finish()


ADDRESS = "memory://out"


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a remote that is empty before and after, with retries that do not wait, and no threads that stay."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("upload")]


def expected(tmp_path: Path, **options: Any) -> dict[str, bytes]:
    """Return the files of the data set of these tests, written to a directory."""
    return files(write(MDSWriter, tmp_path / "expected", COLUMNS, SAMPLES, size_limit=500, **options))


def uploaded() -> dict[str, bytes]:
    """Return the files on the remote."""
    return {name.removeprefix("/out/"): file.getvalue() for name, file in MemoryFileSystem.store.items()}


def write_all_and_fail(writer: Any) -> None:
    """Write all samples, and end with an error."""
    for sample in SAMPLES:
        writer.write(sample)
    raise ZeroDivisionError


def test_a_writer_is_finished_once_and_without_an_exception(tmp_path: Path, remote: Any) -> None:
    """A refused sample changes nothing, nothing follows `finish`, and after an exception there is no index anywhere."""
    out = tmp_path / "out"
    writer = MDSWriter(columns=COLUMNS, out=out)
    writer.write(SAMPLES[0])
    with pytest.raises(TypeError):
        writer.write({"i": "x", "t": b""})
    writer.write({**SAMPLES[1], "b": object()})
    writer.finish()
    before = files(out)
    writer.finish()
    assert files(out) == before
    assert read(out) == SAMPLES[:2]
    assert infos(write(MDSWriter, tmp_path / "empty", COLUMNS, [])) == ()
    for place in (str(tmp_path / "half"), ADDRESS):
        failed = MDSWriter(columns=COLUMNS, out=place, size_limit=500)
        with pytest.raises(ZeroDivisionError), failed:
            write_all_and_fail(failed)
        failed.finish()
    for finished in (writer, failed):
        with pytest.raises(ValueError, match="has finished"):
            finished.write(SAMPLES[0])
    for found in (files(tmp_path / "half"), uploaded()):
        assert "shard.00000.mds" in found
        assert "index.json" not in found


def test_a_killed_writer_leaves_no_index(tmp_path: Path) -> None:
    """A writer killed while the index gets its name leaves no index, old or new, and the next one clears up."""
    out = write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES[:1])

    def killed() -> None:
        os.replace = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        write(MDSWriter, out, COLUMNS, SAMPLES, size_limit=500, exist_ok=True)

    assert in_child(killed) == -signal.SIGKILL
    assert (out / "shard.00003.mds").exists()
    assert not (out / "index.json").exists()
    write(MDSWriter, out, COLUMNS, SAMPLES[:3], exist_ok=True)
    assert read(out) == SAMPLES[:3]
    assert sorted(files(out)) == ["index.json", "shard.00000.mds"]


def test_shards_are_on_the_disk_before_the_index_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss leaves no index without its shards: each file is synced, then the index is renamed."""
    events: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: events.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    rename = os.replace
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("renamed"), rename(*names)))
    write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES[:1], size_limit=1)
    assert events[:2] == ["shard.00000.mds", "shard.00001.mds"]
    assert events[2].startswith(".index.json.tmp-")
    assert events[3:] == ["renamed", "out"]


def test_what_is_there_is_not_overwritten_unless_it_may_be(tmp_path: Path, remote: Any) -> None:
    """A place with any content is an error; with `exist_ok`, the data set in it goes, and nothing else."""
    kept = {"notes.txt", "sub/index.json", "sub/shard.00000.mds", "shard.1.mds", "my.shard.00000.mds", "shard.00000.py"}
    gone = {"shard.00007.json", "shard.00007.json.meta.zstd", "shard.123456.csv.gz", "index.json"}
    for place, local in (((out := tmp_path / "out"), True), (ADDRESS, False)):
        (out / "sub").mkdir(parents=True, exist_ok=True)
        for name in kept | gone | ({".index.json.tmp-host-1-0123456789abcdef"} if local else set()):
            (out / name).write_bytes(b"mine") if local else remote.pipe(f"/out/{name}", b"mine")
        before = files(out), uploaded()
        with pytest.raises(FileExistsError, match="exist_ok=True"):
            MDSWriter(columns=COLUMNS, out=str(place))
        assert (files(out), uploaded()) == before
        write(MDSWriter, place, COLUMNS, SAMPLES[:2], exist_ok=True)
        found = files(out) if local else uploaded()
        assert set(found) == {"index.json", "shard.00000.mds", *kept}
        assert all(found[name] == b"mine" for name in kept)
    assert read(out) == SAMPLES[:2]


def test_a_line_may_hold_anything_that_json_can_quote(tmp_path: Path) -> None:
    """Newlines inside values come back, and a boolean is a number."""
    samples = [{"a": "1\n2\r\n3"}, {"a": "\x00,\t"}]
    assert read(write(JSONWriter, tmp_path / "out", {"a": "str"}, samples)) == samples
    assert read(write(CSVWriter, tmp_path / "other", {"a": "int"}, [{"a": True}])) == [{"a": 1}]


@pytest.mark.parametrize(
    ("keep_local", "others"), [(True, {}), (False, {}), (False, {"mine.txt": b"mine"})], ids=["kept", "gone", "others"]
)
def test_a_pair_gets_all_files(tmp_path: Path, remote: Any, keep_local: bool, others: dict[str, bytes]) -> None:
    """Both places have all files; without `keep_local`, the written files go, no others."""
    whole, local = expected(tmp_path), tmp_path / "local"
    with MDSWriter(columns=COLUMNS, out=(str(local), ADDRESS), keep_local=keep_local, size_limit=500) as writer:
        for sample in SAMPLES:
            writer.write(sample)
        for name, content in others.items():
            (local / name).write_bytes(content)
    assert uploaded() == whole
    assert files(local) == {**(whole if keep_local else {}), **others}
    assert local.exists() == (keep_local or bool(others))


def test_an_address_alone_gets_all_files(tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address has all files, also one of a local file, and a bar counts them."""
    whole, there = expected(tmp_path), tmp_path / "there"
    monkeypatch.setattr("sys.stderr", shown := io.StringIO())
    write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=500, max_workers=1, progress_bar=True)
    assert uploaded() == whole
    assert shown.getvalue().count(f"{len(whole) - 1}/{len(whole) - 1}") == 1
    write(MDSWriter, f"file://{there}", COLUMNS, SAMPLES, size_limit=500)
    assert files(there) == whole


def while_uploading(monkeypatch: pytest.MonkeyPatch, event: Callable[[str], object]) -> None:
    """Let something happen before a file is on the remote."""
    upload = MemoryFileSystem.pipe_file

    def pipe_file(file_system: Any, path: str, value: bytes, **options: Any) -> None:
        event(path.rpartition("/")[2])
        upload(file_system, path, value, **options)

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)


def test_an_upload_that_fails_is_tried_again(
    tmp_path: Path, remote: Any, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """An upload is tried `retry` times more; then all files exist, or no index, and the error names the file."""
    cut, denied = ConnectionError("cut"), PermissionError("no")
    attempts: list[str] = []
    failing: dict[str, Any] = {}

    def fail(uploading: str) -> None:
        attempts.append(uploading)
        if uploading == failing["name"] and attempts.count(uploading) <= failing["num_times"]:
            raise failing["error"]

    while_uploading(monkeypatch, fail)
    for name, (error, num_times, num_attempts) in itertools.product(
        ("shard.00001.mds", "index.json"), ((cut, 2, 3), (cut, 99, 3), (denied, 99, 1))
    ):
        MemoryFileSystem.store.clear()
        attempts.clear()
        failing |= {"name": name, "error": error, "num_times": num_times}
        with pytest.raises(OSError) if num_times == 99 else contextlib.nullcontext() as caught:  # noqa: PT011
            write(MDSWriter, ADDRESS, COLUMNS, SAMPLES, size_limit=500, retry=2)
        assert attempts.count(name) == num_attempts
        if caught is None:
            assert uploaded() == expected(tmp_path / name)
        else:
            assert "index.json" not in uploaded()
            assert str(caught.value) == snapshot


def test_the_index_is_uploaded_after_all_shards(remote: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index is uploaded last, however long a shard takes."""
    order: list[str] = []

    def slowly(name: str) -> None:
        if name == "shard.00000.mds":
            threading.Event().wait(0.1)
        order.append(name)

    while_uploading(monkeypatch, slowly)
    write(MDSWriter, ADDRESS, COLUMNS, SAMPLES[:8], size_limit=1, max_workers=2, retry=0)
    assert len(uploaded()) == 10
    assert order[-1] == "index.json"
    assert order[0] != "shard.00000.mds"  # the writer does not wait for each shard


# Merged indexes


def part(out: Path, first: int, *, writer_class: Any = MDSWriter, **options: Any) -> Path:
    """Write a data set of four samples in several shards."""
    return write(writer_class, out, {"i": "int"}, [{"i": first + i} for i in range(4)], size_limit=280, **options)


def fours(directory: Path) -> list[int]:
    """Return the first samples of the data sets that were merged, in order."""
    found = [sample["i"] for sample in read(directory)]
    assert found == [first + i for first in found[::4] for i in range(4)]
    return found[::4]


def test_all_below_a_directory_are_one_in_the_order_of_their_names(tmp_path: Path) -> None:
    """The merged index is that of the original, and it yields all samples, once, also if it is merged again."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for root in (ours, theirs):
        for first, name in enumerate(("b", "10", "9", "a")):
            part(root / name, 10 * first, compression="gz" if name == "a" else None, hashes=["md5"])
        part(root / "text", 40, writer_class=CSVWriter)
    merge_index(str(ours))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves each index open
        mosaic("streaming.base.util").merge_index(str(theirs))
    assert files(ours)["index.json"] == files(theirs)["index.json"]
    assert fours(ours) == [10, 20, 30, 0, 40]
    part(ours / "x" / "1", 50)
    merge_index(str(ours / "x"))
    merge_index(str(ours))
    assert fours(ours) == [10, 20, 30, 0, 40, 50]
    listed = [str(ours / "a" / "index.json"), str(ours / "10/"), str(ours / "a" / "index.json")]
    merge_index(index_file_urls=listed, out=str(ours))  # in this order, each once
    assert fours(ours) == [30, 10]


def test_indexes_are_merged_below_an_address_and_in_a_pair(tmp_path: Path, remote: Any) -> None:
    """Indexes are read from an address, and the merged one is written there; for a pair, to both or to the address."""
    for first, name in enumerate("ab"):
        part(tmp_path / name, 10 * first)
        remote.put(str(tmp_path / name), f"/out/{name}", recursive=True)
    merge_index(ADDRESS)
    merged = remote.cat_file("/out/index.json")
    remote.rm_file("/out/index.json")
    merge_index((str(tmp_path), ADDRESS), keep_local=False)
    assert remote.cat_file("/out/index.json") == merged
    assert not (tmp_path / "index.json").exists()
    pairs = [(str(tmp_path / name / "index.json"), f"{ADDRESS}/{name}/index.json") for name in "ab"]
    (tmp_path / "b" / "index.json").unlink()
    merge_index(pairs, (str(tmp_path), ADDRESS))
    assert (tmp_path / "index.json").read_bytes() == merged
    assert fours(tmp_path) == [0, 10]


def damaged_part(root: Path) -> str:
    """Return the root of a data set whose index names a file outside."""
    index = part(root / "a", 0) / "index.json"
    index.write_text(index.read_text().replace("shard.00000.mds", "../x"))
    return str(root)


def unanswered(root: Path) -> None:
    """Merge an index that doesn't answer: a pipe that nobody writes to."""
    index = part(root / "a", 0) / "index.json"
    index.unlink()
    os.mkfifo(index)
    try:
        merge_index(str(root), download_timeout=0.01)
    finally:
        index.write_bytes(b"")


def mds(out: Path, writer: Any = MDSWriter, columns: Any = COLUMNS, **options: Any) -> Any:
    """Create a writer."""
    return writer(columns=columns, out=str(out), **options)


REFUSED: dict[str, tuple[Callable[[Path], Any], type[Exception]]] = {
    **{
        f"size_limit {limit}": (lambda out, limit=limit: mds(out, size_limit=limit), ValueError)
        for limit in (-1, 2**32, "5tb", "-1kb")
    },
    "compression": (lambda out: mds(out, compression="lz4"), ValueError),
    "hash": (lambda out: mds(out, hashes=["crc32"]), ValueError),
    "hashes unsorted": (lambda out: mds(out, hashes=["sha1", "md5"]), ValueError),
    **{
        f"encoding {name!r}": (lambda out, name=name: mds(out, columns={"a": name}), TypeError)
        for name in ("no", "int:3", "ndarray:bool", "ndarray:int32:")
    },
    "retry": (lambda out: mds(out, retry=-1), ValueError),
    "max_workers": (lambda out: mds(out, max_workers=0), ValueError),
    "two addresses": (lambda out: MDSWriter(columns=COLUMNS, out=(ADDRESS, ADDRESS)), ValueError),
    "three places": (lambda out: MDSWriter(columns=COLUMNS, out=(str(out), ADDRESS, ADDRESS)), ValueError),
    "bytes in lines": (lambda out: mds(out, CSVWriter, {"a": "bytes"}), TypeError),
    "no newline": (lambda out: mds(out, JSONWriter, {"a": "int"}, newline=""), ValueError),
    "no separator": (lambda out: mds(out, XSVWriter, {"a": "str"}, separator=""), ValueError),
    "a separator in a name": (lambda out: mds(out, TSVWriter, {"a\t": "str"}), ValueError),
    "nothing to merge": (lambda out: merge_index(str(out)), FileNotFoundError),
    "an index elsewhere": (lambda out: merge_index([str(out.parent / "index.json")], str(out)), ValueError),
    "a text for a number": (lambda out: write(CSVWriter, out, {"a": "int"}, [{"a": "1"}]), TypeError),
    "a separator": (lambda out: write(CSVWriter, out, {"a": "str"}, [{"a": "x,"}]), ValueError),
    "a newline": (lambda out: write(TSVWriter, out, {"a": "str"}, [{"a": "x\n"}]), ValueError),
    "a damaged index": (lambda out: merge_index(damaged_part(out)), IndexFileError),
    "a place that does not answer": (unanswered, TimeoutError),
}
LATE = tuple(REFUSED)[-6:]


@pytest.mark.parametrize("case", REFUSED)
def test_what_makes_no_sense_is_refused(case: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Bad arguments are refused before anything is written, bad samples and parts before an index is."""
    call, kind = REFUSED[case]
    assert plain(error_of(kind, lambda: call(tmp_path / "out")), DIR=tmp_path) == snapshot
    assert not (tmp_path / "out" / ("index.json" if case in LATE else "")).exists()
