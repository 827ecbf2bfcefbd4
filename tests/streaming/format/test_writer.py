import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lightning_faulttolerant
from lightning_faulttolerant.streaming import CSVWriter, JSONWriter, MDSWriter
from lightning_faulttolerant.streaming.format import writer as writer_module
from tests.foreign import mosaic
from tests.streaming.format.shards import files, infos, read, write

COLUMNS = {"i": "int", "t": "bytes"}
SAMPLES = [{"i": i, "t": b"t" * (i % 13)} for i in range(100)]


def test_it_is_public() -> None:
    """The writer is a public name of the package."""
    assert lightning_faulttolerant.MDSWriter is MDSWriter


@pytest.mark.parametrize("size_limit", [1, 2000, "2kb", "0.5 MB", 2**32 - 1, None, 0])
def test_shards_are_cut_where_the_original_cuts(size_limit: Any, tmp_path: Path) -> None:
    """All files are the original's, for each way to give the limit."""
    limit = 1 << 19 if size_limit == "0.5 MB" else size_limit
    ours = write(MDSWriter, tmp_path / "ours", COLUMNS, SAMPLES, size_limit=size_limit)
    theirs = write(mosaic().MDSWriter, tmp_path / "theirs", COLUMNS, SAMPLES, size_limit=limit)
    assert files(ours) == files(theirs)
    assert read(ours) == SAMPLES


def test_no_shard_is_larger_than_the_limit_but_those_of_one_sample(tmp_path: Path) -> None:
    """The limit holds for the file, including its header."""
    out = write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES, size_limit=600)
    assert all(info.files[0].num_bytes <= 600 for info in infos(out))
    assert len(infos(out)) > 5


@pytest.mark.parametrize("size_limit", [-1, 2**32, "4gb", "5tb", "x", "10 apples", "-1kb", "1e9", "64x"])
def test_a_limit_that_can_not_be_is_refused(size_limit: Any, tmp_path: Path) -> None:
    """Offsets have 32 bits, and a limit is a number of bytes; otherwise nothing is created."""
    with pytest.raises(ValueError, match="size_limit="):
        MDSWriter(columns=COLUMNS, out=str(tmp_path / "out"), size_limit=size_limit)
    assert not (tmp_path / "out").exists()


def test_a_shard_that_its_offsets_can_not_describe_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit, a shard past 4 GiB is an error, not a data set with wrong offsets."""
    monkeypatch.setattr(writer_module, "_MAX_SHARD_BYTES", 1000)
    with pytest.raises(ValueError, match="offsets have 32 bits"):
        write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES, size_limit=None)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"compression": "lz4"},
        {"compression": "zstd:99"},
        {"hashes": ["crc32"]},
        {"hashes": ["sha1", "md5"]},
        {"hashes": ["md5", "md5"]},
        {"retry": -1},
        {"max_workers": 0},
    ],
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    """Bad arguments are refused before anything is written."""
    with pytest.raises(ValueError, match=r".+"):
        MDSWriter(columns=COLUMNS, out=str(tmp_path / "out"), **options)
    assert not (tmp_path / "out").exists()


def test_an_unknown_argument_is_refused(tmp_path: Path) -> None:
    """A misspelled option is not ignored."""
    with pytest.raises(TypeError, match="compresion"):
        MDSWriter(columns=COLUMNS, out=str(tmp_path / "out"), compresion="zstd")


@pytest.mark.parametrize("writer_name", ["MDSWriter", "JSONWriter", "CSVWriter"])
def test_the_description_is_that_of_the_original(writer_name: str, tmp_path: Path) -> None:
    """`get_config` returns the description that is written into each shard."""
    columns = {"b": "int", "a": "str"}
    ours, theirs = (
        getattr(module, writer_name)(columns=columns, out=str(tmp_path / name), hashes=["md5"], compression="gz:1")
        for module, name in ((lightning_faulttolerant.streaming, "ours"), (mosaic(), "theirs"))
    )
    assert ours.get_config() == theirs.get_config()
    ours.finish()
    theirs.finish()


ALL_SAMPLES = [
    {
        "i": i,
        "s": "ä" * i,
        "b": b"\x00" * i,
        "f": np.float64(i / 3),
        "n": np.full((i + 1, 2), i, np.int16),
        "x": np.full((2, 2), i, np.float32),
        "j": {"k": [i]},
        "si": 10**i,
    }
    for i in range(30)
]
ALL_COLUMNS = {
    "i": "int",
    "s": "str",
    "b": "bytes",
    "f": "float64",
    "n": "ndarray",
    "x": "ndarray:float32:2,2",
    "j": "json",
    "si": "str_int",
}


def equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """Return whether samples are equal, including arrays."""
    return len(found) == len(expected) and all(
        np.array_equal(a[name], b[name]) for a, b in zip(found, expected, strict=True) for name in b
    )


@pytest.mark.parametrize("compression", [None, "br:2", "bz2", "gz:3", "snappy", "zstd", "zstd:7"])
@pytest.mark.parametrize("hashes", [[], ["sha1"], ["blake2s", "md5", "xxh3_64"]])
def test_each_library_reads_the_other_in_every_compression_with_hashes(
    compression: str | None, hashes: list[str], tmp_path: Path
) -> None:
    """Files are equal except for the time in gzip's header; each library reads the other's, and the digests match."""
    options = {"compression": compression, "hashes": hashes, "size_limit": 2000}
    ours = write(MDSWriter, tmp_path / "ours", ALL_COLUMNS, ALL_SAMPLES, **options)
    theirs = write(mosaic().MDSWriter, tmp_path / "theirs", ALL_COLUMNS, ALL_SAMPLES, **options)
    assert sorted(files(ours)) == sorted(files(theirs))
    if compression != "gz:3":
        assert files(ours) == files(theirs)
    assert equal(read(theirs), ALL_SAMPLES)
    entries = json.loads((ours / "index.json").read_text())["shards"]
    assert len(entries) > 3
    assert equal(read_by_the_original(ours, entries), ALL_SAMPLES)


def read_by_the_original(out: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Decompress, check digests, and decode with the original's functions."""
    decompress = mosaic("streaming.base.compression").decompress
    get_hash = mosaic("streaming.base.hashing").get_hash
    samples = []
    for entry in entries:
        stored = entry["zip_data"] or entry["raw_data"]
        data = (out / stored["basename"]).read_bytes()
        raw = decompress(entry["compression"], data)
        for described, content in ((stored, data), (entry["raw_data"], raw)):
            assert described["bytes"] == len(content)
            assert described["hashes"] == {name: get_hash(name, content) for name in entry["hashes"]}
        (out / entry["raw_data"]["basename"]).write_bytes(raw)
        reader = mosaic("streaming.base.format").reader_from_json(str(out), "", entry)
        samples += [reader.get_item(i) for i in range(reader.samples)]
    return samples


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd"])
def test_the_same_samples_are_the_same_files(compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set written again, at another time, is byte for byte the same."""
    first = write(MDSWriter, tmp_path / "first", COLUMNS, SAMPLES, compression=compression, hashes=["md5"])
    monkeypatch.setattr("time.time", lambda: 1e9)
    second = write(MDSWriter, tmp_path / "second", COLUMNS, SAMPLES, compression=compression, hashes=["md5"])
    assert files(first) == files(second)


def test_nothing_is_published_if_the_block_is_left_by_an_exception(tmp_path: Path) -> None:
    """Half a data set has no index, so it does not pass for a complete one; the exception is the caller's own."""
    writer = MDSWriter(columns=COLUMNS, out=str(tmp_path / "out"), size_limit=500)

    def write_half() -> None:
        with writer:
            for sample in SAMPLES:
                writer.write(sample)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert (tmp_path / "out" / "shard.00000.mds").exists()
    assert not (tmp_path / "out" / "index.json").exists()
    with pytest.raises(ValueError, match="has finished"):
        writer.write(SAMPLES[0])
    writer.finish()
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_sample_that_is_refused_can_be_left_out(tmp_path: Path) -> None:
    """A value that can't be stored leaves the writer as it was."""
    with MDSWriter(columns=COLUMNS, out=str(tmp_path / "out")) as writer:
        writer.write(SAMPLES[0])
        with pytest.raises(TypeError):
            writer.write({"i": "x", "t": b""})
        writer.write(SAMPLES[1])
    assert read(tmp_path / "out") == SAMPLES[:2]


def test_a_writer_without_a_block_is_finished_by_hand_and_once(tmp_path: Path) -> None:
    """`finish` may be called again, and nothing can be written after it."""
    writer = MDSWriter(columns=COLUMNS, out=tmp_path / "out")
    writer.write(SAMPLES[0])
    writer.finish()
    before = files(tmp_path / "out")
    writer.finish()
    assert files(tmp_path / "out") == before
    with pytest.raises(ValueError, match="has finished"):
        writer.write(SAMPLES[0])
    assert read(tmp_path / "out") == SAMPLES[:1]


def test_a_killed_writer_leaves_no_index(tmp_path: Path) -> None:
    """A writer killed at any point, even while the index gets its name, leaves no index, old or new."""
    out = write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES[:1])
    child = os.fork()
    if not child:
        os.replace = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
        write(MDSWriter, out, COLUMNS, SAMPLES, size_limit=500, exist_ok=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
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


def test_what_is_there_is_not_overwritten_unless_it_may_be(tmp_path: Path) -> None:
    """A directory with any content is an error; with `exist_ok`, the data set in it goes, and nothing else."""
    out = write(MDSWriter, tmp_path / "out", COLUMNS, SAMPLES, size_limit=500)
    before = files(out)
    with pytest.raises(FileExistsError, match="exist_ok=True"):
        MDSWriter(columns=COLUMNS, out=str(out))
    assert files(out) == before
    kept = {"notes.txt", "sub/index.json", "sub/shard.00000.mds", "shard.1.mds", "my.shard.00000.mds", "shard.00000.py"}
    for name in kept:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"mine")
    for name in (
        "shard.00007.json",
        "shard.00007.json.meta.zstd",
        "shard.123456.csv.gz",
        ".index.json.tmp-host-1-0123456789abcdef",
    ):
        (out / name).write_bytes(b"of an older data set")
    write(MDSWriter, out, COLUMNS, SAMPLES[:2], exist_ok=True)
    assert set(files(out)) == {"index.json", "shard.00000.mds", *kept}
    assert all((out / name).read_bytes() == b"mine" for name in kept)
    assert read(out) == SAMPLES[:2]


def test_an_empty_data_set_has_an_index(tmp_path: Path) -> None:
    """Without samples there is no shard, and an existing empty directory may be written to."""
    (tmp_path / "out").mkdir()
    assert infos(write(MDSWriter, tmp_path / "out", COLUMNS, [])) == ()


@pytest.mark.parametrize(("writer_class", "encoding"), [(JSONWriter, "str"), (CSVWriter, "str"), (MDSWriter, "str")])
def test_columns_beyond_those_named_are_not_written(writer_class: Any, encoding: str, tmp_path: Path) -> None:
    """As in the original, a sample may have more columns than are stored."""
    out = write(writer_class, tmp_path / "out", {"a": encoding}, [{"a": "x", "b": object()}])
    assert read(out) == [{"a": "x"}]
