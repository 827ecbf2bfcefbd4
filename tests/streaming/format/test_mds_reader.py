import gc
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError
from lightning_faulttolerant.streaming.format.index import layout_of
from lightning_faulttolerant.streaming.format.readers import open_shard
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.streaming.format.shards import infos, opened, read, same, write

FIXED = {"i": "int", "x": "ndarray:int32:4", "z": "float32", "l": "ndarray:uint8:5000"}
VARIABLE = {"i": "int", "s": "str", "y": "ndarray", "b": "bytes"}


def fixed(number: int) -> dict[str, Any]:
    """Return a sample of `FIXED`."""
    return {
        "i": -number,
        "x": np.arange(4, dtype=np.int32) + number,
        "z": np.float32(number / 3),
        "l": np.full(5000, number % 256, np.uint8),
    }


def variable(number: int) -> dict[str, Any]:
    """Return a sample of `VARIABLE`."""
    return {"i": number, "s": "ü" * (number % 7), "y": np.full((2, number % 5 + 1), number), "b": b"b" * (number % 3)}


SHAPED = {"same": "ndarray", "turned": "ndarray:int16", "typed": "ndarray", "large": "ndarray"}


def shaped(number: int) -> dict[str, Any]:
    """Return a sample of `SHAPED`: arrays of equal byte size but other shapes or types, and one that is large."""
    return {
        "same": np.full((2, 3), number, np.float64),
        "turned": np.full((2, 3) if number % 7 else (3, 2), number, np.int16),
        "typed": np.full(4, number, np.int32 if number % 7 else np.float32),
        "large": np.full(1000, number, np.int64),
    }


KINDS = {
    "fixed": (FIXED, fixed),
    "variable": (VARIABLE, variable),
    "shaped": (SHAPED, shaped),
    "no columns": ({}, lambda number: {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ids", [0, 1, 15, 16, 256, 257, 700])
def test_many_at_once_are_the_same_as_one_by_one(kind: str, num_ids: int, tmp_path: Path) -> None:
    """Samples by many ids, in any order and repeated, and their columns, equal those read one by one."""
    columns, make = KINDS[kind]
    reader = opened(write(MDSWriter, tmp_path / "out", columns, [make(i) for i in range(50)]))
    ids = np.random.default_rng(0).integers(0, 50, num_ids)
    for given in (ids, ids.tolist(), tuple(ids.tolist())):
        found = list(reader.samples(given))
        assert len(found) == num_ids
        assert all(same(sample, make(i)) for i, sample in zip(ids.tolist(), found, strict=True))
        assert all(list(sample) == sorted(columns) for sample in found)
    assert all(same(reader[i], make(i)) and list(reader[i]) == sorted(columns) for i in range(50))
    reader.close()


def test_ids_outside_of_the_shard_are_index_errors(tmp_path: Path) -> None:
    """An id counts from the front or, alone, from the end, and no other sample is returned than the requested one."""
    reader = opened(write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(5)]))
    assert same(reader[-1], variable(4))
    assert same(reader[-5], variable(0))
    for wrong in (5, -6, 10**12):
        with pytest.raises(IndexError, match=r"There is no sample .* has 5\."):
            reader[wrong]
    for ids in ([0, 5], [-1, 0], [10**12]):
        with pytest.raises(IndexError, match=r"There are no samples .* has 5\."):
            list(reader.samples(ids))
    reader.close()


def test_samples_read_so_far_stay_and_no_more_are_read_after_close(tmp_path: Path) -> None:
    """Closing while a caller iterates takes no sample away that it has, and a closed reader says that it is closed."""
    reader = opened(write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(600)]))
    iterator = reader.samples(range(600))
    samples = [next(iterator) for _ in range(10)]
    reader.close()
    reader.close()
    gc.collect()
    assert all(same(sample, variable(i)) for i, sample in enumerate(samples))
    with pytest.raises(ValueError, match="closed"):
        reader[0]
    with pytest.raises(ValueError, match="closed"):
        list(iterator)


def test_a_reader_outlives_its_file(tmp_path: Path) -> None:
    """A file that another process evicts while it is open can still be read to its end."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(5)])
    reader = opened(out)
    (out / "shard.00000.mds").unlink()
    assert same(list(reader.samples(range(5))), [variable(i) for i in range(5)])
    reader.close()
    with pytest.raises(MissingShardError, match=r"shard\.00000\.mds does not exist"):
        opened(out)


def test_a_shard_that_is_not_used_any_more_gives_its_file_back(tmp_path: Path) -> None:
    """A reader that is dropped without `close`, after samples were read, leaves no file open."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(5)])
    path = str(out / "shard.00000.mds")
    reader = opened(out)
    samples = [reader[0], *reader.samples(range(5))]
    assert path in Path("/proc/self/maps").read_text()
    del reader
    gc.collect()
    assert path not in Path("/proc/self/maps").read_text()
    assert len(samples) == 6


def test_equal_columns_are_worked_out_once(tmp_path: Path) -> None:
    """Shards with equal columns share their layout, and those with other columns have their own."""
    first, second = (write(MDSWriter, tmp_path / name, FIXED, [fixed(0)]) for name in "ab")
    third = write(MDSWriter, tmp_path / "c", VARIABLE, [variable(0)])
    layouts = [layout_of(infos(out)[0].columns) for out in (first, second, third)]
    assert layouts[0] is layouts[1]
    assert layouts[0] is not layouts[2]


def test_shards_without_samples_are_read(tmp_path: Path) -> None:
    """A first sample larger than the limit leaves an empty shard before it, and all samples exist."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(4)], size_limit=10)
    assert [info.num_samples for info in infos(out)] == [0, 1, 1, 1, 1]
    assert same(read(out), [variable(i) for i in range(4)])
    reader = opened(out)
    assert (len(reader), list(reader.samples([]))) == (0, [])
    with pytest.raises(IndexError):
        reader[0]
    reader.close()


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


DAMAGED_HEADS: dict[str, Callable[[bytearray], None]] = {
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


@pytest.mark.parametrize("kind", ["fixed", "variable"])
@pytest.mark.parametrize("damage", DAMAGED_HEADS)
def test_a_damaged_head_is_found_when_the_shard_is_opened(kind: str, damage: str, tmp_path: Path) -> None:
    """A shard with an impossible number or impossible offsets is refused before a sample is read, naming the file."""
    columns, make = KINDS[kind]
    out = write(MDSWriter, tmp_path / "out", columns, [make(i) for i in range(NUM_SAMPLES)])
    data = bytearray((out / "shard.00000.mds").read_bytes())
    DAMAGED_HEADS[damage](data)
    (out / "shard.00000.mds").write_bytes(data)
    with pytest.raises(DamagedShardError, match=r"shard\.00000\.mds is damaged"):
        opened(out)


@pytest.mark.parametrize("num_bytes", [0, 1, 3, 4, 7, 8, 50, 87, 88, 200, -1])
def test_a_shard_of_another_size_is_refused(num_bytes: int, tmp_path: Path) -> None:
    """A file that is cut, or has bytes after its end, is damaged, also if the index was adapted to it."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(NUM_SAMPLES)])
    data = (out / "shard.00000.mds").read_bytes()
    index = (out / "index.json").read_text()
    for changed in (data[:num_bytes], data + data[:50]):
        (out / "shard.00000.mds").write_bytes(changed)
        with pytest.raises(DamagedShardError, match=f"has {len(changed)} bytes, but the index says {len(data)}"):
            opened(out)
        agreeing = index.replace(f'"bytes": {len(data)}', f'"bytes": {len(changed)}')
        (out / "index.json").write_text(agreeing)
        with pytest.raises(DamagedShardError):
            opened(out)
        (out / "index.json").write_text(index)


def test_an_index_of_other_columns_is_found_out(tmp_path: Path) -> None:
    """Columns of an index that need more bytes than the samples have are found when the shard is opened."""
    out = write(MDSWriter, tmp_path / "out", {"i": "int"}, [{"i": 1}])
    other = write(MDSWriter, tmp_path / "other", {"i": "int", "j": "int"}, [{"i": 1, "j": 2}])
    short = write(MDSWriter, tmp_path / "short", {"s": "str"}, [{"s": ""}])
    long = write(MDSWriter, tmp_path / "long", {"s": "str", "t": "str"}, [{"s": "", "t": ""}])
    for mine, theirs in ((out, other), (other, out), (short, long)):
        (tmp_path / "shard").write_bytes((mine / "shard.00000.mds").read_bytes())
        size = (mine / "shard.00000.mds").stat().st_size
        text = (theirs / "index.json").read_text()
        was = (theirs / "shard.00000.mds").stat().st_size
        assert f'"bytes": {was}' in text
        (tmp_path / "index.json").write_text(
            text.replace(f'"bytes": {was}', f'"bytes": {size}').replace("shard.00000.mds", "shard")
        )
        with pytest.raises(DamagedShardError, match="its columns need"):
            opened(tmp_path)


@pytest.mark.parametrize("column", range(3))
@pytest.mark.parametrize("length", [0, 3, 1000, 2**31, 2**32 - 1])
def test_a_damaged_length_is_found_with_its_sample(column: int, length: int, tmp_path: Path) -> None:
    """A column length that does not fit its sample raises for that sample, alone or among others, and for no other."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(NUM_SAMPLES)])
    data = bytearray((out / "shard.00000.mds").read_bytes())
    put(data, offset(data, 13) + 4 * column, length)
    (out / "shard.00000.mds").write_bytes(data)
    reader = opened(out)
    with pytest.raises(DamagedShardError, match="sample 13 can't be decoded"):
        reader[13]
    with pytest.raises(DamagedShardError, match="sample 13 can't be decoded"):
        list(reader.samples(range(NUM_SAMPLES)))
    others = [i for i in range(NUM_SAMPLES) if i != 13]
    assert same(list(reader.samples(others)), [variable(i) for i in others])
    reader.close()


@pytest.mark.parametrize("difference", [-1, 1])
@pytest.mark.parametrize("column", [0, 1])
def test_no_column_takes_bytes_of_its_neighbour(column: int, difference: int, tmp_path: Path) -> None:
    """If any bytes would be a value, a length off by one is found: the columns do not fill the sample."""
    samples = [{"a": b"aaaa", "b": b"bbbb"}] * 20
    out = write(MDSWriter, tmp_path / "out", {"a": "bytes", "b": "bytes"}, samples)
    data = bytearray((out / "shard.00000.mds").read_bytes())
    put(data, offset(data, 4) + 4 * column, 4 + difference)
    (out / "shard.00000.mds").write_bytes(data)
    reader = opened(out)
    with pytest.raises(DamagedShardError, match="sample 4 can't be decoded"):
        reader[4]
    with pytest.raises(DamagedShardError, match="sample 4 can't be decoded"):
        list(reader.samples(range(20)))
    reader.close()


def test_no_value_is_made_of_bytes_after_its_sample(tmp_path: Path) -> None:
    """A column that would end after its sample is named before a value is built from bytes outside the sample."""
    samples = [{"a": {"k": 1}, "b": b"b"}] * 3
    out = write(MDSWriter, tmp_path / "out", {"a": "pkl", "b": "bytes"}, samples)
    data = bytearray((out / "shard.00000.mds").read_bytes())
    put(data, offset(data, 1), 60)
    (out / "shard.00000.mds").write_bytes(data)
    reader = opened(out, allow_unsafe_types=True)
    with pytest.raises(DamagedShardError, match="column 'a' ends at byte"):
        reader[1]
    reader.close()


def test_a_value_that_can_not_be_decoded_names_its_sample(tmp_path: Path) -> None:
    """Bytes that are not UTF-8 text are a damaged shard, not a decoding error without context."""
    out = write(MDSWriter, tmp_path / "out", {"s": "str"}, [{"s": "bad"}] * 2 + [{"s": "x"}] * 18)
    path = out / "shard.00000.mds"
    path.write_bytes(path.read_bytes().replace(b"bad", b"b\xffd"))
    reader = opened(out)
    with pytest.raises(DamagedShardError, match=r"sample 0 can't be decoded \(.*utf-8"):
        list(reader.samples(range(20)))
    with pytest.raises(DamagedShardError, match="sample 1 can't be decoded"):
        reader[1]
    assert reader[2] == {"s": "x"}
    reader.close()


def test_any_flipped_byte_gives_samples_or_the_right_error(tmp_path: Path) -> None:
    """Whatever byte is damaged, the error names the damage; there is no other error and no other number of samples."""
    out = write(MDSWriter, tmp_path / "out", VARIABLE, [variable(i) for i in range(3)])
    data = bytearray((out / "shard.00000.mds").read_bytes())
    (info,) = infos(out)
    num_damaged = 0
    # The description between offsets and samples is not read.
    for at in (*range(20), *range(offset(data, 0), len(data))):
        flip = 0x80 if at % 2 else 0x01
        data[at] ^= flip
        (out / "shard.00000.mds").write_bytes(data)
        try:
            reader = open_shard(info, str(out))
            assert len([*reader.samples(range(3)), reader[0]]) == 4
            reader.close()
        except DamagedShardError:
            num_damaged += 1
        data[at] ^= flip
    assert num_damaged > 30


def test_a_fixed_column_whose_index_has_no_size_is_read_by_its_length(tmp_path: Path) -> None:
    """A size of null or 0 in an index means that each sample states it, whatever the encoding."""
    samples = [{"a": struct.pack("<q", i), "b": "x"} for i in range(20)]
    out = write(MDSWriter, tmp_path / "out", {"a": "bytes", "b": "str"}, samples)
    index = (out / "index.json").read_text().replace('["bytes", "str"]', '["int", "str"]')
    for size in ("null", "0"):
        (out / "index.json").write_text(index.replace("[null, null]", f"[{size}, null]"))
        assert read(out) == [{"a": i, "b": "x"} for i in range(20)]
