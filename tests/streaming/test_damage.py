"""Any damaged byte of a shard is detected or harmless, and samples by number are those that were written."""

from __future__ import annotations

import gc
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError
from lightning_faulttolerant.streaming import CSVWriter, JSONWriter, MDSWriter
from lightning_faulttolerant.streaming.format.readers import open_shard
from tests.messages import plain
from tests.streaming.shards import infos, opened, read, same, write

FIXED = {"i": "int", "x": "ndarray:int32:4", "z": "float32", "l": "ndarray:uint8:5000"}
VARIABLE = {"i": "int", "s": "str", "y": "ndarray", "b": "bytes"}
SHAPED = {"same": "ndarray", "turned": "ndarray:int16", "typed": "ndarray", "large": "ndarray"}
LINES = {"z": "int", "a": "str", "f": "float"}


def fixed(number: int) -> dict[str, Any]:
    """Return a sample of `FIXED`."""
    values = np.arange(4, dtype=np.int32) + number, np.float32(number / 3), np.full(5000, number % 256, np.uint8)
    return {"i": -number, "x": values[0], "z": values[1], "l": values[2]}


def variable(number: int) -> dict[str, Any]:
    """Return a sample of `VARIABLE`."""
    return {"i": number, "s": "ü" * (number % 7), "y": np.full((2, number % 5 + 1), number), "b": b"b" * (number % 3)}


def shaped(number: int) -> dict[str, Any]:
    """Return a sample of `SHAPED`: arrays of equal byte size but other shapes or types, and one that is large."""
    return {
        "same": np.full((2, 3), number, np.float64),
        "turned": np.full((2, 3) if number % 7 else (3, 2), number, np.int16),
        "typed": np.full(4, number, np.int32 if number % 7 else np.float32),
        "large": np.full(1000, number, np.int64),
    }


def line(number: int) -> dict[str, Any]:
    """Return a sample of `LINES`."""
    return {"z": number - 5, "a": "ä" * (number % 9), "f": number / 3}


KINDS: dict[str, tuple[Any, dict[str, str], Callable[[int], dict[str, Any]]]] = {
    "fixed": (MDSWriter, FIXED, fixed),
    "variable": (MDSWriter, VARIABLE, variable),
    "shaped": (MDSWriter, SHAPED, shaped),
    "no columns": (MDSWriter, {}, lambda number: {}),
    "csv": (CSVWriter, LINES, line),
    "json": (JSONWriter, LINES, line),
}


def written(kind: str, out: Path, num_samples: int, **options: Any) -> Path:
    """Write a data set of a kind."""
    writer, columns, make = KINDS[kind]
    return write(writer, out, columns, [make(i) for i in range(num_samples)], **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ids", [0, 1, 15, 16, 257, 700])
def test_many_at_once_are_the_same_as_one_by_one(kind: str, num_ids: int, tmp_path: Path) -> None:
    """Samples by many ids, in any order and repeated, and their columns, equal those read one by one."""
    _, columns, make = KINDS[kind]
    reader = opened(written(kind, tmp_path / "out", 50))
    ids = np.random.default_rng(0).integers(0, 50, num_ids)
    for given_ids in (ids, ids.tolist(), tuple(ids.tolist())):
        found = list(reader.samples(given_ids))
        assert len(found) == num_ids
        assert all(same(sample, make(i)) for i, sample in zip(ids.tolist(), found, strict=True))
        assert all(sorted(sample) == sorted(columns) for sample in found)
    assert all(same(reader[i], make(i)) for i in range(50))
    assert same(reader[-1], make(49))
    assert same(reader[-50], make(0))
    for wrong in (50, -51, 10**12):
        with pytest.raises(IndexError, match=r"There is no sample .* has 50\."):
            reader[wrong]
    for ids_outside in ([0, 50], [-1, 0], [10**12]):
        with pytest.raises(IndexError, match=r"There are no samples .* has 50\."):
            list(reader.samples(ids_outside))
    reader.close()


@pytest.mark.parametrize("kind", ["variable", "csv"])
def test_samples_read_so_far_stay_and_no_more_are_read_after_close(kind: str, tmp_path: Path) -> None:
    """A reader outlives its file, and closing it takes no sample away; a dropped one leaves no file open."""
    out, make = written(kind, tmp_path / "out", 600), KINDS[kind][2]
    reader, dropped = opened(out), opened(out)
    path = next(out.glob("shard.00000.*"))
    iterator = reader.samples(range(600))
    samples = [next(iterator) for _ in range(10)]
    dropped_samples = [dropped[0], *dropped.samples(range(5))]
    for file in out.glob("shard*"):
        file.unlink()
    assert same(list(reader.samples([599, 3])), [make(599), make(3)])
    reader.close()
    reader.close()
    del dropped
    gc.collect()
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert all(same(sample, make(i)) for i, sample in enumerate(samples))
    assert same(dropped_samples[0], make(0))
    for read_on in (lambda: reader[0], lambda: list(iterator)):
        with pytest.raises(ValueError, match="closed"):
            read_on()
    with pytest.raises(MissingShardError, match=r"shard\.00000\.\S+ does not exist"):
        opened(out)


@pytest.mark.parametrize("kind", ["variable", "csv", "json"])
def test_shards_without_samples_are_read(kind: str, tmp_path: Path) -> None:
    """A first sample larger than the limit leaves an empty shard before it, and all samples exist."""
    out = written(kind, tmp_path / "out", 4, size_limit=1)
    assert [info.num_samples for info in infos(out)] == [0, 1, 1, 1, 1]
    assert same(read(out), [KINDS[kind][2](i) for i in range(4)])
    reader = opened(out)
    assert (len(reader), list(reader.samples([]))) == (0, [])
    with pytest.raises(IndexError):
        reader[0]
    reader.close()


@pytest.mark.parametrize("kind", ["fixed", "variable", "csv", "json"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_gives_samples_or_the_right_error(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Flipped, cut, or zeroed at any place, a file gives as many samples, or an error that names the damage."""
    out = written(kind, tmp_path_factory.mktemp("out"), 3)
    path = data.draw(st.sampled_from(sorted(out.glob("shard*"))))
    content = bytearray(path.read_bytes())
    at, how = data.draw(st.integers(0, len(content) - 1)), data.draw(st.sampled_from(["flip", "cut", "zero", "longer"]))
    if how == "flip":
        content[at] ^= data.draw(st.integers(1, 255))
    elif how == "zero":
        content[at:] = bytes(len(content) - at)
    path.write_bytes(content[:at] if how == "cut" else content + b"x" if how == "longer" else content)
    try:
        reader = open_shard(infos(out)[0], str(out))
        assert len([*reader.samples(range(3)), reader[0]]) == 4
        reader.close()
        assert how in ("flip", "zero")
    except DamagedShardError:
        pass


NUM_SAMPLES = 20


def offset(data: bytearray, number: int) -> int:
    """Return where a sample begins."""
    return int(struct.unpack_from("<I", data, 4 * (1 + number))[0])


def put(data: bytearray, at: int, value: int) -> None:
    """Write a number into a file."""
    struct.pack_into("<I", data, at, value)


def swap_offsets(data: bytearray) -> None:
    """Exchange the beginnings of two samples."""
    first, second = offset(data, 3), offset(data, 5)
    put(data, 4 * 4, second)
    put(data, 4 * 6, first)


HEADS: dict[str, Callable[[bytearray], None]] = {
    "the number of samples is smaller": lambda data: put(data, 0, NUM_SAMPLES - 1),
    "the number of samples is larger": lambda data: put(data, 0, NUM_SAMPLES + 1),
    "the number of samples is huge": lambda data: put(data, 0, 2**32 - 1),
    "the first offset points into the table": lambda data: put(data, 4, 8),
    "an offset is 0": lambda data: put(data, 4 * 8, 0),
    "an offset is after the end": lambda data: put(data, 4 * 8, 2**32 - 1),
    "the last offset is after the end": lambda data: put(data, 4 * (NUM_SAMPLES + 1), len(data) + 1),
    "the last offset is before the end": lambda data: put(data, 4 * (NUM_SAMPLES + 1), len(data) - 1),
    "offsets do not ascend": swap_offsets,
    "all is zero": lambda data: data.__setitem__(slice(None), bytes(len(data))),
}


@pytest.mark.parametrize("damage", HEADS)
def test_a_damaged_head_is_found_when_the_shard_is_opened(
    damage: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """A shard with an impossible number or impossible offsets is refused before a sample is read, naming the file."""
    for kind in ("fixed", "variable"):
        path = written(kind, tmp_path / kind, NUM_SAMPLES) / "shard.00000.mds"
        data = bytearray(path.read_bytes())
        HEADS[damage](data)
        path.write_bytes(data)
        with pytest.raises(DamagedShardError) as caught:
            opened(path.parent)
        assert plain(str(caught.value), DIR=tmp_path) == snapshot


@pytest.mark.parametrize("num_bytes", [0, 3, 4, 7, 8, 50, 87, 88, 200, -1, None])
def test_a_shard_of_another_size_is_refused(num_bytes: int | None, tmp_path: Path) -> None:
    """A file that is cut, or has bytes after its end, is damaged, also if the index was adapted to it."""
    out = written("variable", tmp_path / "out", NUM_SAMPLES)
    data, index = (out / "shard.00000.mds").read_bytes(), (out / "index.json").read_text()
    changed = data + data[:50] if num_bytes is None else data[:num_bytes]
    (out / "shard.00000.mds").write_bytes(changed)
    with pytest.raises(DamagedShardError, match=f"has {len(changed)} bytes, but the index says {len(data)}"):
        opened(out)
    (out / "index.json").write_text(index.replace(f'"bytes": {len(data)}', f'"bytes": {len(changed)}'))
    with pytest.raises(DamagedShardError):
        opened(out)


def test_an_index_of_other_columns_is_found_out(tmp_path: Path) -> None:
    """Columns of an index that need more bytes than the samples have are found when the shard is opened."""
    one, two = ({"i": "int"}, {"i": 1}), ({"i": "int", "j": "int"}, {"i": 1, "j": 2})
    short, long = ({"s": "str"}, {"s": ""}), ({"s": "str", "t": "str"}, {"s": "", "t": ""})
    for number, (mine, theirs) in enumerate(((one, two), (two, one), (short, long))):
        out = write(MDSWriter, tmp_path / f"mine {number}", mine[0], [mine[1]])
        other = write(MDSWriter, tmp_path / f"theirs {number}", theirs[0], [theirs[1]])
        data = (out / "shard.00000.mds").read_bytes()
        index = json.loads((other / "index.json").read_text())
        index["shards"][0]["raw_data"]["bytes"] = len(data)
        (out / "index.json").write_text(json.dumps(index))
        with pytest.raises(DamagedShardError, match="its columns need"):
            opened(out)


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("length", [0, 3, 5, 1000, 2**31, 2**32 - 1])
def test_a_damaged_length_is_found_with_its_sample(column: int, length: int, tmp_path: Path) -> None:
    """A column length that does not fit its sample raises for that sample, alone or among others, and for no other."""
    samples = [{"a": b"aaaa", "b": b"bbbb", "c": b"cccc"}] * NUM_SAMPLES
    path = write(MDSWriter, tmp_path / "out", dict.fromkeys("abc", "bytes"), samples) / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    put(data, offset(data, 13) + 4 * column, length)
    path.write_bytes(data)
    reader = opened(path.parent)
    for read_it in (lambda: reader[13], lambda: list(reader.samples(range(NUM_SAMPLES)))):
        with pytest.raises(DamagedShardError, match="sample 13 can't be decoded"):
            read_it()
    assert list(reader.samples([i for i in range(NUM_SAMPLES) if i != 13])) == samples[1:]
    reader.close()


def test_no_value_is_made_of_bytes_after_its_sample(tmp_path: Path) -> None:
    """A column that would end after its sample is named before a value is built from bytes outside the sample."""
    samples = [{"a": {"k": 1}, "b": b"b"}] * 3
    path = write(MDSWriter, tmp_path / "out", {"a": "pkl", "b": "bytes"}, samples) / "shard.00000.mds"
    data = bytearray(path.read_bytes())
    put(data, offset(data, 1), 60)
    path.write_bytes(data)
    with pytest.raises(DamagedShardError, match="column 'a' ends at byte"):
        opened(path.parent, allow_unsafe_types=True)[1]


def test_a_value_that_can_not_be_decoded_names_its_sample(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 text are a damaged shard, not a decoding error without context."""
    path = write(MDSWriter, tmp_path / "out", {"s": "str"}, [{"s": "bad"}] * 2 + [{"s": "x"}] * 18) / "shard.00000.mds"
    path.write_bytes(path.read_bytes().replace(b"bad", b"b\xffd"))
    reader = opened(path.parent)
    with pytest.raises(DamagedShardError, match=r"sample 0 can't be decoded \(.*utf-8"):
        list(reader.samples(range(20)))
    with pytest.raises(DamagedShardError, match="sample 1 can't be decoded"):
        reader[1]
    assert reader[2] == {"s": "x"}
    reader.close()


def test_a_fixed_column_whose_index_has_no_size_is_read_by_its_length(tmp_path: Path) -> None:
    """A size of null or 0 in an index means that each sample states it, whatever the encoding."""
    samples = [{"a": struct.pack("<q", i), "b": "x"} for i in range(20)]
    out = write(MDSWriter, tmp_path / "out", {"a": "bytes", "b": "str"}, samples)
    index = (out / "index.json").read_text().replace('["bytes", "str"]', '["int", "str"]')
    for size in ("null", "0"):
        (out / "index.json").write_text(index.replace("[null, null]", f"[{size}, null]"))
        assert read(out) == [{"a": i, "b": "x"} for i in range(20)]


def edited(name: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the content of a file, and write its new size into the index."""

    def change(out: Path) -> None:
        path, index = out / name, out / "index.json"
        content = edit(path.read_bytes())
        path.write_bytes(content)
        shards = json.loads(index.read_text())
        shards["shards"][0]["raw_meta" if name.endswith("meta") else "raw_data"]["bytes"] = len(content)
        index.write_text(json.dumps(shards))

    return change


CSV, META, JSON = "shard.00000.csv", "shard.00000.csv.meta", "shard.00000.json"
DAMAGED_LINES = {
    "data cut": edited(CSV, lambda data: data[:-1]),
    "data longer": edited(CSV, lambda data: data + b"x"),
    "data empty": edited(CSV, lambda data: b""),
    "columns exchanged": edited(CSV, lambda data: data.replace(b"a,f,z", b"f,a,z")),
    "a value more": edited(CSV, lambda data: data.replace(b"\xc3\xa4\n", b",a\n").replace(b"0.0", b"0,0")),
    "a value less": edited(CSV, lambda data: data.replace(b",0.0", b"00.0")),
    "no number": edited(CSV, lambda data: data.replace(b"0.0", b"x.y")),
    "a line does not end": edited(CSV, lambda data: data.replace(b"0.0,-5\n", b"0.0,-55")),
    "meta cut": edited(META, lambda data: data[:20]),
    "meta empty": edited(META, lambda data: b""),
    "a different number of samples": edited(META, lambda data: b"\x00" + data[1:]),
    "another first offset": edited(META, lambda data: data[:4] + b"\x05" + data[5:]),
    "offsets that do not ascend": edited(META, lambda data: data[:8] + data[12:16] + data[8:12] + data[16:]),
    "no object": edited(JSON, lambda data: data.replace(data[: data.index(b"\n")], b"[" + b" " * 32 + b"1]")),
    "no JSON": edited(JSON, lambda data: data.replace(b"}\n", b";\n", 1)),
    "another column": edited(JSON, lambda data: data.replace(b'"z"', b'"y"', 1)),
}


@pytest.mark.parametrize("damage", DAMAGED_LINES)
def test_damaged_lines_are_found(damage: str, tmp_path: Path) -> None:
    """A shard with data and offsets that do not match is an error when it is opened or its sample is read."""
    kind = "json" if damage in ("no object", "no JSON", "another column") else "csv"
    out = written(kind, tmp_path / "out", 5)
    DAMAGED_LINES[damage](out)
    with pytest.raises(DamagedShardError, match=rf"shard\.00000\.{kind} is damaged"):
        read(out)
