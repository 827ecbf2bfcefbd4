import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import streaming
from lightning_faulttolerant.errors import DamagedShardError, MissingShardError
from lightning_faulttolerant.streaming import CSVWriter, JSONWriter, TSVWriter, XSVWriter
from tests.foreign import mosaic
from tests.streaming.format.shards import files, infos, opened, read, write

COLUMNS = {"z": "int", "a": "str", "f": "float"}
SAMPLES = [{"z": i - 5, "a": "ä" * (i % 9), "f": i / 3} for i in range(60)]
FORMATS: dict[str, dict[str, Any]] = {"JSON": {}, "CSV": {}, "TSV": {}, "XSV": {"separator": "||"}}


def writers(name: str) -> tuple[Any, Any]:
    """Return our writers and the original's."""
    module = mosaic("streaming.base.format.xsv") if name == "XSV" else mosaic()
    return getattr(streaming, f"{name}Writer"), getattr(module, f"{name}Writer")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("compression", [None, "zstd:1"])
def test_files_are_those_of_the_original_and_samples_come_back(
    name: str, newline: str, compression: str | None, tmp_path: Path
) -> None:
    """All files are byte for byte the original's, and the samples read are those written."""
    options = {**FORMATS[name], "newline": newline, "size_limit": 300, "hashes": ["sha1"], "compression": compression}
    ours, theirs = (
        write(writer, tmp_path / str(i), COLUMNS, SAMPLES, **options) for i, writer in enumerate(writers(name))
    )
    assert len(files(ours)) > 6
    assert files(ours) == files(theirs)
    assert read(theirs) == SAMPLES


@pytest.mark.parametrize("name", FORMATS)
def test_the_original_reads_what_we_write(name: str, tmp_path: Path) -> None:
    """Each shard of ours, read by the original's reader, has the written samples."""
    out = write(writers(name)[0], tmp_path / "out", COLUMNS, SAMPLES, size_limit=300, **FORMATS[name])
    reader_of = mosaic("streaming.base.format").reader_from_json
    entries = json.loads((out / "index.json").read_text())["shards"]
    readers = [reader_of(str(out), "", entry) for entry in entries]
    assert [reader.get_item(i) for reader in readers for i in range(reader.samples)] == SAMPLES


@pytest.mark.parametrize("name", FORMATS)
def test_a_first_sample_larger_than_the_limit_comes_back(name: str, tmp_path: Path) -> None:
    """The empty shard before a large first sample is read too; its JSON file has no byte."""
    out = write(writers(name)[0], tmp_path / "out", COLUMNS, SAMPLES[:3], size_limit=1, **FORMATS[name])
    assert [info.num_samples for info in infos(out)] == [0, 1, 1, 1]
    assert read(out) == SAMPLES[:3]


@pytest.mark.parametrize("name", FORMATS)
def test_what_a_column_does_not_hold_is_refused(name: str, tmp_path: Path) -> None:
    """A value of another type, an unknown encoding, and an empty newline are errors."""
    writer_class, options = writers(name)[0], FORMATS[name]
    with writer_class(columns={"a": "int"}, out=str(tmp_path / "out"), **options) as writer:
        with pytest.raises(TypeError, match="holds int, got str"):
            writer.write({"a": "1"})
        with pytest.raises(KeyError):
            writer.write({})
        writer.write({"a": True})
    assert read(tmp_path / "out") == [{"a": 1}]
    with pytest.raises(TypeError, match="encoding 'bytes' is unknown"):
        writer_class(columns={"a": "bytes"}, out=str(tmp_path / "other"), **options)
    with pytest.raises(ValueError, match=r"newline=.*empty"):
        writer_class(columns={"a": "int"}, out=str(tmp_path / "other"), newline="", **options)


@pytest.mark.parametrize(("writer_class", "separator"), [(CSVWriter, ","), (TSVWriter, "\t")])
def test_a_value_with_a_separator_is_refused(writer_class: Any, separator: str, tmp_path: Path) -> None:
    """Nothing is quoted, so neither values nor names may contain a separator."""
    with writer_class(columns={"a": "str"}, out=str(tmp_path / "out")) as writer:
        for value in (f"x{separator}", "x\n"):
            with pytest.raises(ValueError, match="holds the separator"):
                writer.write({"a": value})
    with pytest.raises(ValueError, match="holds the separator"):
        writer_class(columns={f"a{separator}": "str"}, out=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"separator=.*empty"):
        XSVWriter(columns={"a": "str"}, separator="", out=str(tmp_path / "other"))


def test_a_line_may_hold_anything_that_json_can_quote(tmp_path: Path) -> None:
    """Newlines inside values come back."""
    samples = [{"a": "1\n2\r\n3"}, {"a": "\x00,\t"}]
    assert read(write(JSONWriter, tmp_path / "out", {"a": "str"}, samples)) == samples


def edited(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the content of a file, and write its new size into the index."""

    def change(out: Path) -> None:
        path, index = out / name, out / "index.json"
        before = path.read_bytes()
        path.write_bytes(edit(before))
        shards = json.loads(index.read_text())
        for key in ("raw_data", "raw_meta"):
            if shards["shards"][0][key]["basename"] == name:
                shards["shards"][0][key]["bytes"] = len(edit(before))
        index.write_text(json.dumps(shards))

    return change


DAMAGES = {
    "data cut": edited("shard.00000.csv", lambda data: data[:-1]),
    "data longer": edited("shard.00000.csv", lambda data: data + b"x"),
    "data empty": edited("shard.00000.csv", lambda data: b""),
    "columns exchanged": edited("shard.00000.csv", lambda data: data.replace(b"a,f,z", b"f,a,z")),
    "a value more": edited(
        "shard.00000.csv", lambda data: data.replace(b"\xc3\xa4\n", b",a\n").replace(b"0.0", b"0,0")
    ),
    "no number": edited("shard.00000.csv", lambda data: data.replace(b"0.0", b"x.y")),
    "a line does not end": edited("shard.00000.csv", lambda data: data.replace(b"0.0,-5\n", b"0.0,-55")),
    "meta cut": edited("shard.00000.csv.meta", lambda data: data[:20]),
    "meta empty": edited("shard.00000.csv.meta", lambda data: b""),
    "a different number of samples": edited("shard.00000.csv.meta", lambda data: b"\x00" + data[1:]),
    "another first offset": edited("shard.00000.csv.meta", lambda data: data[:4] + b"\x05" + data[5:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_shard_is_found(damage: str, tmp_path: Path) -> None:
    """A shard with data and offsets that do not match is an error when it is opened or its sample is read."""
    out = write(CSVWriter, tmp_path / "out", COLUMNS, SAMPLES[:5])
    DAMAGES[damage](out)
    with pytest.raises(DamagedShardError, match=r"shard\.00000\.csv is damaged"):
        read(out)


def test_offsets_that_do_not_ascend_are_found_when_the_shard_is_opened(tmp_path: Path) -> None:
    """Two lines do not count as one, though they could be read as one value."""
    out = write(CSVWriter, tmp_path / "out", {"a": "str"}, [{"a": "x"}] * 4)
    meta = bytearray((out / "shard.00000.csv.meta").read_bytes())
    meta[8:12], meta[12:16] = meta[12:16], meta[8:12]
    (out / "shard.00000.csv.meta").write_bytes(meta)
    with pytest.raises(DamagedShardError, match="do not ascend"):
        opened(out)


def test_a_line_of_too_few_values_says_so(tmp_path: Path) -> None:
    """The error names both numbers."""
    out = write(CSVWriter, tmp_path / "out", {"a": "int", "b": "int"}, [{"a": 1, "b": 2}])
    (out / "shard.00000.csv").write_bytes(b"a,b\n112\n")
    with pytest.raises(DamagedShardError, match="1 values for 2 columns"):
        read(out)


def test_lines_that_are_no_samples_are_found(tmp_path: Path) -> None:
    """JSON that is not an object, or lacks a column, is a damaged shard."""
    for data in (b"[1, 2, 345]\n", b'{"b": 1234}\n', b'{"a": 1234;\n'):
        out = write(JSONWriter, tmp_path / str(len(data)) / data[:5].hex(), {"a": "int"}, [{"a": 1234}])
        (out / "shard.00000.json").write_bytes(data)
        with pytest.raises(DamagedShardError, match="sample 0 can't be decoded"):
            read(out)


def test_reading_by_ids_and_after_close(tmp_path: Path) -> None:
    """Ids are checked, a closed reader says so, and a missing meta file is a missing shard."""
    out = write(CSVWriter, tmp_path / "out", COLUMNS, SAMPLES)
    reader = opened(out)
    assert list(reader.samples([3, 3, 0])) == [SAMPLES[3], SAMPLES[3], SAMPLES[0]]
    assert reader[-1] == SAMPLES[-1]
    for ids in ([60], [-1]):
        with pytest.raises(IndexError):
            list(reader.samples(ids))
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader[0]
    (out / "shard.00000.csv.meta").unlink()
    with pytest.raises(MissingShardError, match=r"shard\.00000\.csv\.meta"):
        opened(out)
