from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_faulttolerant.streaming.format.index import parse_index
from lightning_faulttolerant.streaming.format.mds_writer import MDSWriter
from lightning_faulttolerant.streaming.format.opening import open_shard
from tests.foreign import mosaic

COLUMNS = {"i": "int", "x": "ndarray:int32:8", "s": "str", "y": "ndarray", "z": "float32", "b": "bytes", "j": "json"}


def sample(number: int) -> dict[str, Any]:
    """One sample of `COLUMNS`, different for each number."""
    return {
        "i": number,
        "x": np.arange(8, dtype=np.int32) + number,
        "s": "ü" * (number % 7),
        "y": np.full((2, number % 5 + 1), number, np.float64),
        "z": np.float32(number / 3),
        "b": bytes([number % 256]) * (number % 3),
        "j": {"number": [number]},
    }


def write(writer_class: Any, out: Path, num_samples: int, **options: Any) -> None:
    """Write samples 0, 1, ... with a writer, ours or the original's."""
    with writer_class(columns=COLUMNS, out=str(out), **options) as writer:
        for number in range(num_samples):
            writer.write(sample(number))


def read(directory: Path) -> list[dict[str, Any]]:
    """All samples of a data set, in order."""
    samples = []
    for info in parse_index((directory / "index.json").read_bytes(), source=str(directory)):
        reader = open_shard(info, str(directory))
        samples += [reader[number] for number in range(len(reader))]
        reader.close()
    return samples


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two samples have the same columns, types and values."""
    assert list(found) == sorted(expected)
    for name, value in expected.items():
        assert type(found[name]) is type(value)
        assert np.array_equal(found[name], value)
        assert getattr(found[name], "dtype", None) == getattr(value, "dtype", None)


@pytest.mark.parametrize("ours", [True, False], ids=["by us", "by the original"])
def test_samples_come_back_as_they_were_written(tmp_path: Path, ours: bool) -> None:
    """Every sample that a writer wrote is read back, in order, with equal types and values."""
    write(MDSWriter if ours else mosaic().MDSWriter, tmp_path / "out", 100, size_limit="3kb")
    found = read(tmp_path / "out")
    assert len(found) == 100
    for number, values in enumerate(found):
        assert_same(values, sample(number))


def test_our_files_are_those_of_the_original(tmp_path: Path) -> None:
    """Index and shards are byte for byte what the original writes."""
    options = {"size_limit": 3000, "hashes": ["sha1", "xxh64"]}
    write(MDSWriter, tmp_path / "ours", 100, **options)
    write(mosaic().MDSWriter, tmp_path / "theirs", 100, **options)
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert len(names) > 3
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()


@pytest.mark.parametrize("num_ids", [1, 3, 4, 300, 700])
def test_many_at_once_are_the_same_as_one_by_one(tmp_path: Path, num_ids: int) -> None:
    """Samples read by a list of ids, repeats included, are those read one by one."""
    write(MDSWriter, tmp_path / "out", 50)
    (info,) = parse_index((tmp_path / "out" / "index.json").read_bytes(), source="")
    reader = open_shard(info, str(tmp_path / "out"))
    ids = np.random.default_rng(0).integers(0, 50, num_ids)
    found = list(reader.samples(ids))
    assert len(found) == num_ids
    for number, values in zip(ids.tolist(), found, strict=True):
        assert_same(values, sample(number))
    reader.close()
