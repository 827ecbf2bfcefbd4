from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest

from lightning_faulttolerant import Stream, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import FingerprintMismatchError
from tests.foreign import mosaic
from tests.streaming.shards import batches, numbers, shard_paths, write_numbers


@pytest.fixture
def directories(tmp_path: Path) -> list[str]:
    """Return two data sets, of 60 and of 40 samples, the second numbered from 1000."""
    return [write_numbers(tmp_path / "a", 60), write_numbers(tmp_path / "b", 40, first=1000)]


def _mixed(directories: list[str], *weights: dict[str, Any], **options: Any) -> StreamingDataset:
    streams = [
        Stream(local=directory, **weight) for directory, weight in zip(directories, weights or ({}, {}), strict=True)
    ]
    return StreamingDataset(streams=streams, shuffle=True, **options)


def _counts(read: list[int]) -> tuple[int, int]:
    counted = Counter(number >= 1000 for number in read)
    return counted[False], counted[True]


Resolved = list[tuple[float, float, int]]
WEIGHTS: list[tuple[list[dict[str, Any]], dict[str, Any], Resolved]] = [
    ([{"proportion": 1}, {"proportion": 3}], {"epoch_size": 200}, [(0.25, 50 / 60, 50), (0.75, 3.75, 150)]),
    ([{"repeat": 2}, {"repeat": 0.5}], {}, [(6 / 7, 2, 120), (1 / 7, 0.5, 20)]),
    ([{"choose": 0}, {"choose": 90}], {}, [(0, 0, 0), (1, 2.25, 90)]),
]


@pytest.mark.parametrize(("weights", "options", "expected"), WEIGHTS)
def test_an_epoch_has_of_each_stream_what_its_weight_says(
    directories: list[str], weights: list[dict[str, Any]], options: dict[str, Any], expected: Resolved
) -> None:
    """The streams say what their weights come to, a part has other samples in each epoch, and given ones count."""
    given = [Stream(local=directory, **weight) for directory, weight in zip(directories, weights, strict=True)]
    for _ in range(2):
        dataset = StreamingDataset(streams=given, shuffle=True, **options)
        for streams in (given, dataset.streams):
            assert [(stream.proportion, stream.repeat, stream.choose) for stream in streams] == expected
    first, second = numbers(dataset), numbers(dataset)
    assert _counts(first) == _counts(second) == (expected[0][2], expected[1][2])
    assert len(dataset) == len(first)
    assert first != second
    fixed = StreamingDataset(streams=given, sampling_method="fixed", **options)
    assert numbers(fixed) == numbers(fixed)
    assert (dataset.num_samples, dataset.size) == (100, 100)


def test_given_streams_keep_what_was_given(directories: list[str]) -> None:
    """A weight that is set later counts, a second one is refused, and a derived stream keeps its class."""
    named = type("Named", (Stream,), {})
    streams = [named(local=directory) for directory in directories]
    streams[0].choose = 7
    dataset = StreamingDataset(streams=streams, download_retry=5)
    assert _counts(numbers(dataset)) == (7, 40)
    assert [stream.download_retry for stream in (*streams, *dataset.streams)] == [None, None, 5, 5]
    assert [type(stream) for stream in dataset.streams] == [named] * 2
    streams[0].repeat = 3
    with pytest.raises(ValueError, match="at most one"):
        StreamingDataset(streams=streams)


def _loader(directories: list[str], method: str, batch_size: int = 10, num_workers: int = 0) -> StreamingDataLoader:
    dataset = _mixed(directories, batching_method=method, batch_size=batch_size)
    return StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers)


@pytest.mark.parametrize(
    ("method", "expected"), [("random", None), ("stratified", {(6, 4)}), ("per_stream", {(10, 0), (0, 10)})]
)
def test_batches_are_of_the_streams_as_asked_and_are_resumed(
    directories: list[str], method: str, expected: set[tuple[int, int]] | None
) -> None:
    """Each batch has its share of each stream, or is of one, in a drawn order; a resume continues, also in workers."""
    loader = _loader(directories, method)
    epochs = [batches(loader), batches(loader)]
    assert expected in (None, {_counts(batch) for epoch in epochs for batch in epoch})
    assert [_counts(batch) for batch in epochs[0]] != [_counts(batch) for batch in epochs[1]] or method == "stratified"
    assert [len(epoch) for epoch in epochs] == [10, 10] == [len(loader)] * 2
    assert len({number for batch in epochs[0] for number in batch}) == 100
    resumed = _loader(directories, method, num_workers=2)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 1, "sample_in_epoch": 30})
    assert batches(resumed) == epochs[1][3:]
    if method == "stratified":
        other = _loader(directories, method, batch_size=20)
        with pytest.raises(FingerprintMismatchError, match="stratified 10 -> stratified 20"):
            other.load_state_dict({**loader.state_dict(), "sample_in_epoch": 30})


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_streams_have_remotes_and_splits_of_their_own(tmp_path: Path, scheme: str) -> None:
    """Each stream is cached in its own directory; an option left open is the data set's; a path may have colons."""
    for name in ("a", "b::2"):
        write_numbers(tmp_path / "remote" / name / "val", 20, first=100 * ord(name[0]))
    streams = [Stream(remote=f"{scheme}{tmp_path}/remote/{name}", local=str(tmp_path / name)) for name in ("a", "b::2")]
    dataset = StreamingDataset(streams=streams, split="val")
    assert numbers(dataset) == [*range(9700, 9720), *range(9800, 9820)]
    assert (tmp_path / "a" / "val" / "index.json").exists()


def test_the_directory_of_a_remote_is_that_of_the_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `local`, shards go to the same directory as in the original library, one for each remote."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    remote = write_numbers(tmp_path / "data" / "train", 20)
    for given in ({"streams": [Stream(remote=remote)]}, {"remote": remote}):
        assert numbers(StreamingDataset(**given)) == list(range(20))
    assert len(list((tmp_path / "tmp").iterdir())) == 1
    for split in (None, "train"):
        theirs = mosaic().Stream._get_temporary_directory(SimpleNamespace(remote=remote, split=split or ""))
        assert Stream(remote=remote, split=split).local == theirs
        assert Stream(local="here", split=split).local == "here"


@pytest.mark.parametrize("remote", ["{}", "file://{}", "memory://{}"])
def test_a_local_directory_never_gives_samples_of_another_data_set(tmp_path: Path, remote: str) -> None:
    """With equal indexes: of another address, of the same address written again, or of one shard that was replaced."""
    fs, local = fsspec.core.url_to_fs(remote.format(tmp_path))[0], str(tmp_path / "local")

    def put(first: int, name: str, pattern: str = "*") -> None:
        for path in Path(write_numbers(tmp_path / f"from {first}", 40, first=first, hashes=())).glob(pattern):
            fs.makedirs(str(tmp_path / name), exist_ok=True)
            fs.pipe_file(str(tmp_path / name / path.name), path.read_bytes())

    def read(name: str) -> int:
        return max(numbers(StreamingDataset(local, remote.format(tmp_path / name))))

    put(0, "a")
    put(1000, "b")
    assert [read("a"), read("b"), read("a")] == [39, 1039, 39]
    put(2000, "a")
    assert [read("a"), read("b")] == [2039, 1039]
    put(3000, "b", shard_paths(tmp_path / "from 1000")[-1].name)
    assert [read("a"), read("b")] == [2039, 3039]


def test_two_data_sets_in_use_with_one_local_directory_are_refused(directories: list[str], tmp_path: Path) -> None:
    """As in the original library; one that is no longer in use, or is the same, is no obstacle."""
    local, (one, other) = str(tmp_path / "local"), directories
    with pytest.raises(ValueError, match=f"{one} and of {other}"):
        StreamingDataset(streams=[Stream(local=local, remote=one), Stream(local=local, remote=other)])
    first = StreamingDataset(local, one)
    first.itself = first  # type: ignore[attr-defined]
    assert len(StreamingDataset(local, f"{one}/")) == 60
    with pytest.raises(ValueError, match=f"{one} and of {other}"):
        StreamingDataset(f"{local}/.", other)
    del first
    assert len(StreamingDataset(local, other)) == 40
