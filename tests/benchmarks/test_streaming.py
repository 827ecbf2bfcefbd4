"""The benchmarks of streaming data sets run and give figures for all that is compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import order, report_streaming, streaming
from benchmarks.floor import floor_loader
from benchmarks.libraries import LIBRARIES, Data, Ours, Place, Plain, first_batch, throughput, write


@pytest.fixture(scope="module")
def data() -> Data:
    """A few samples in some shards."""
    return Data(name="few", num_samples=96, dtype="int32", length=16, shard_bytes=1 << 10, batch_size=4)


@pytest.fixture(scope="module")
def directory(data: Data, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where they were written."""
    directory = tmp_path_factory.mktemp("data") / "few-mds"
    write(Plain(), data, directory)
    return directory


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")  # the floor copies nothing
@pytest.mark.parametrize("library", [Plain(), Ours()], ids=["floor", "ours"])
def test_each_reads_what_was_written(library: Plain, data: Data, directory: Path, tmp_path: Path) -> None:
    """The floor and ours give all samples, in order or shuffled, near or far, from a position on."""
    for place in (Place(directory=directory), Place(directory=directory, cache=tmp_path)):
        for shuffle, at in ((False, 0), (True, 0), (True, 88)):
            loader = library.loader(data, place, num_workers=0, shuffle=shuffle, at=at)
            found = {int(n): row for batch in loader for n, row in zip(batch["number"], batch["values"], strict=True)}
            assert len(found) == data.num_samples - at
            assert (list(found) == list(range(data.num_samples))) is not shuffle
            for number, row in found.items():
                np.testing.assert_array_equal(row.numpy(), data.sample(number)["values"], strict=True)


def test_times_and_shards_are_those_of_a_run(data: Data, directory: Path) -> None:
    """There are samples per second, and a cold first batch has fetched some shards, but not all."""
    library = Ours()
    assert throughput(library, data, directory, num_workers=0, shuffle=True, seconds=0.1) > 1
    seconds, fetched = first_batch(library, data, directory, num_workers=0, at=0.9, cold=True)
    assert seconds > 0
    assert 0 < fetched < len(list(directory.glob("*.mds")))
    assert first_batch(library, data, directory, num_workers=0, at=0.9, cold=False)[1] == 0


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning")
def test_floor_reads_the_given_position(directory: Path) -> None:
    """Its order is one permutation, of which a later position leaves out the beginning."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": 0, "shuffle": True}
    whole, rest = (
        torch.cat([batch["number"] for batch in floor_loader(directory, at=at, **options)]) for at in (0, 40)
    )
    assert torch.equal(whole[40:], rest)


def test_order_is_timed_by_samples_and_by_position(tmp_path: Path) -> None:
    """Ours and the original's both take time and memory, for each number of samples."""
    order.main(["--quick", "--output", str(tmp_path / "order.json")])
    figures = json.loads((tmp_path / "order.json").read_text())
    for found in (*figures["sizes"].values(), {"ours": figures["positions"]["0.9"]}):
        assert all(found[name]["s"] > 0 and found[name]["bytes"] > 0 for name in found if name != "shards")
    assert "mosaic" in figures["sizes"]["10000"]


@pytest.mark.slow
def test_all_libraries_are_measured_in_one_run(tmp_path: Path) -> None:
    """Each case has a figure of each library, and of ours the ratios to the others within their ranges."""
    streaming.main(["--quick", "--data", "small", "--output", str(tmp_path / "streaming.json")])
    figures = json.loads((tmp_path / "streaming.json").read_text())
    assert "mosaicml-streaming" in figures["versions"]
    cases = figures["cases"]["small"]
    for case in (*cases["speed"], *cases["warm"], *cases["cold"]):
        assert set(case["medians"]) == set(LIBRARIES)
        for of in case["ratios"].values():
            assert 0 < of["low"] <= of["ratio"] <= of["high"]
    order.main(["--quick", "--output", str(tmp_path / "order.json")])
    both = {"streaming": figures, "order": json.loads((tmp_path / "order.json").read_text())}
    for table in report_streaming.TABLES.values():
        assert table(both)
