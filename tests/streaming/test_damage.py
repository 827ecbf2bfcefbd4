"""Any damaged byte of a shard is detected or harmless, and samples by number are those that were written."""

from __future__ import annotations

import itertools
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
from tests.messages import error_of, plain
from tests.streaming.shards import infos, opened, read, same, write

LINES = {"z": "int", "a": "str", "f": "float"}
KINDS: dict[str, tuple[Any, dict[str, str], Callable[[int], dict[str, Any]]]] = {
    "fixed": (
        MDSWriter,
        {"i": "int", "x": "ndarray:int32:4", "l": "ndarray:uint8:5000"},
        lambda n: {"i": -n, "x": np.arange(4, dtype=np.int32) + n, "l": np.full(5000, n % 256, np.uint8)},
    ),
    "variable": (
        MDSWriter,
        {"i": "int", "s": "str", "y": "ndarray", "b": "bytes"},
        lambda n: {"i": n, "s": "ü" * (n % 7), "y": np.full((2, n % 5 + 1), n), "b": b"b" * (n % 3)},
    ),
    "shaped": (  # arrays of equal byte size but other shapes or types, and one that is large
        MDSWriter,
        {"turned": "ndarray:int16", "typed": "ndarray", "large": "ndarray"},
        lambda n: {
            "turned": np.full((2, 3) if n % 7 else (3, 2), n, np.int16),
            "typed": np.full(4, n, np.int32 if n % 7 else np.float32),
            "large": np.full(1000, n, np.int64),
        },
    ),
    "text": (MDSWriter, {"s": "str"}, lambda n: {"s": "bad" if n < 2 else "x"}),
    "pickled": (MDSWriter, {"a": "pkl", "b": "bytes"}, lambda n: {"a": {"k": 1}, "b": b"b"}),
    "csv": (CSVWriter, LINES, lambda n: {"z": n - 5, "a": "ä" * (n % 9), "f": n / 3}),
    "json": (JSONWriter, LINES, lambda n: {"z": n - 5, "a": "ä" * (n % 9), "f": n / 3}),
}


def written(kind: str, out: Path, num_samples: int = 20, **options: Any) -> Path:
    """Write a data set of a kind."""
    writer, columns, make = KINDS[kind]
    return write(writer, out, columns, map(make, range(num_samples)), **options)


@pytest.mark.parametrize("kind", ["fixed", "variable", "shaped", "csv", "json"])
def test_many_at_once_are_the_same_as_one_by_one(kind: str, tmp_path: Path) -> None:
    """Samples by many ids, in any order and repeated, and their columns, equal those read one by one."""
    make = KINDS[kind][2]
    reader = opened(written(kind, tmp_path / "out", 50))
    for num_ids in (0, 15, 16, 700):
        ids = np.random.default_rng(0).integers(0, 50, num_ids)
        assert same(list(reader.samples(ids)), [make(i) for i in ids.tolist()])
    assert same([reader[i] for i in (*range(50), -1, -50)], [make(i) for i in (*range(50), 49, 0)])
    for wrong in (50, -51):
        with pytest.raises(IndexError, match=r"There is no sample .* has 50\."):
            reader[wrong]
    for ids_outside in ([0, 50], [-1, 0]):
        with pytest.raises(IndexError, match=r"There are no samples .* has 50\."):
            list(reader.samples(ids_outside))


@pytest.mark.parametrize("kind", ["variable", "csv"])
def test_samples_read_so_far_stay_and_no_more_are_read_after_close(kind: str, tmp_path: Path) -> None:
    """A reader outlives its file, and closing it takes no sample away."""
    out, make = written(kind, tmp_path / "out", 600), KINDS[kind][2]
    reader = opened(out)
    iterator = reader.samples(range(600))
    samples = [next(iterator) for _ in range(10)]
    for file in out.glob("shard*"):
        file.unlink()
    assert same(list(reader.samples([599, 3])), [make(599), make(3)])
    reader.close()
    assert str(out) not in Path("/proc/self/maps").read_text()
    assert same(samples, [make(i) for i in range(10)])
    for read_on in (lambda: reader[0], lambda: list(iterator)):
        with pytest.raises(ValueError, match="closed"):
            read_on()
    with pytest.raises(MissingShardError, match=r"shard\.00000\.\S+ does not exist"):
        opened(out)


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


Edit = Callable[[bytes], bytes]


def broken(directory: Path, edit: Edit, name: str = "shard.00000.mds") -> Path:
    """Change the content of a file of a data set, write its new size into the index, and return the directory."""
    path, index = directory / name, directory / "index.json"
    path.write_bytes(content := edit(path.read_bytes()))
    entries = json.loads(index.read_text())
    entries["shards"][0]["raw_meta" if name.endswith("meta") else "raw_data"]["bytes"] = len(content)
    index.write_text(json.dumps(entries))
    return directory


def put(at: int, value: int) -> Edit:
    """Write a number into a file, counted from its end if it is negative."""
    return lambda data: (d := bytearray(data), struct.pack_into("<I", d, at, value))[0]


def put_in_sample(number: int, at: int, value: int) -> Edit:
    """Write a number into a sample."""
    return lambda data: put(struct.unpack_from("<I", data, 4 * (1 + number))[0] + at, value)(data)


DAMAGE: dict[str, tuple[str, str, Edit]] = {
    "the first offset points into the table": ("fixed", "mds", put(4, 8)),
    "an offset is 0": ("variable", "mds", put(4 * 8, 0)),
    "offsets do not ascend": (
        "variable",
        "mds",
        lambda data: data[:16] + data[24:28] + data[20:24] + data[16:20] + data[28:],
    ),
    "no text": ("text", "mds", lambda data: data.replace(b"bad", b"b\xffd", 1)),
    "a column after the end of its sample": ("pickled", "mds", put_in_sample(1, 0, 60)),
    "data cut": ("csv", "csv", lambda data: data[:-1]),
    "columns exchanged": ("csv", "csv", lambda data: data.replace(b"a,f,z", b"f,a,z")),
    "a value less": ("csv", "csv", lambda data: data.replace(b",0.0", b"00.0")),
    "no number": ("csv", "csv", lambda data: data.replace(b"0.0", b"x.y")),
    "a line does not end": ("csv", "csv", lambda data: data.replace(b"0.0,-5\n", b"0.0,-55")),
    "meta cut": ("csv", "csv.meta", lambda data: data[:20]),
    "a different number of samples": ("csv", "csv.meta", lambda data: b"\x00" + data[1:]),
    "no object": (
        "json",
        "json",
        lambda data: b"[" + b" " * (data.index(b"\n") - 2) + b"]" + data[data.index(b"\n") :],
    ),
    "no JSON": ("json", "json", lambda data: data.replace(b"}\n", b";\n", 1)),
    "another column": ("json", "json", lambda data: data.replace(b'"z"', b'"y"', 1)),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_found_and_named(case: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A file whose parts contradict each other is refused when it is opened or its sample is read, naming the file."""
    kind, suffix, edit = DAMAGE[case]
    out = broken(written(kind, tmp_path), edit, f"shard.00000.{suffix}")
    assert plain(error_of(DamagedShardError, lambda: read(out, allow_unsafe_types=True)), DIR=tmp_path) == snapshot


def test_a_damaged_length_is_found_with_its_sample(tmp_path: Path) -> None:
    """A column length that does not fit its sample raises for that sample, alone or among others, and for no other."""
    samples = [{"a": b"aaaa", "b": b"bbbb", "c": b"cccc"}] * 20
    for column, length in itertools.product(range(3), (3, 5, 2**32 - 1)):
        out = write(MDSWriter, tmp_path / f"{column} {length}", dict.fromkeys("abc", "bytes"), samples)
        reader = opened(broken(out, put_in_sample(13, 4 * column, length)))
        for read_it in (lambda r=reader: r[13], lambda r=reader: list(r.samples(range(20)))):
            with pytest.raises(DamagedShardError, match="sample 13 can't be decoded"):
                read_it()
        assert list(reader.samples([i for i in range(20) if i != 13])) == samples[1:]


def test_an_index_of_other_columns_is_found_out(tmp_path: Path) -> None:
    """Columns that need more bytes than the samples have are found."""
    for name, value in (("int", 1), ("str", "")):
        one, two = (
            write(MDSWriter, tmp_path / name / keys, dict.fromkeys(keys, name), [dict.fromkeys(keys, value)])
            for keys in ("a", "ab")
        )
        (one / "index.json").write_bytes((two / "index.json").read_bytes())
        with pytest.raises(DamagedShardError, match="its columns need"):
            opened(broken(one, bytes))


@pytest.mark.parametrize("encoding", ["int32", "ndarray:int8:4"])
def test_a_length_in_a_sample_is_that_of_the_type(encoding: str, tmp_path: Path) -> None:
    """An index may leave the length of a number or an array to its samples; one that its type hasn't is damage."""
    index = write(MDSWriter, tmp_path, {"a": "bytes"}, [{"a": bytes(4)}, {"a": bytes(5)}]) / "index.json"
    index.write_text(index.read_text().replace('["bytes"]', f'["{encoding}"]'))
    assert np.sum(opened(tmp_path)[0]["a"]) == 0
    with pytest.raises(DamagedShardError, match="a value has 5 bytes, its encoding 4"):
        read(tmp_path)
