from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import ResumableDataLoader, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.errors import StreamingError
from tests.streaming.shard_files import batches, numbers, write

EXAMPLE = """
    dataset = StreamingDataset(local='/tmp/cache', remote='s3://remote/dataset', batch_size=1)
    dataloader = StreamingDataLoader(dataset, batch_size=1)

    # Here, we assume each sample in our dataset has fields 'x' and 'y'.
    # We save the dataloader state after 4 batches, and stop after 6 batches.
    state_dict = None
    for i, batch in enumerate(dataloader):
        print(i, batch['x'], batch['y'])
        if i == 4:
            state_dict = dataloader.state_dict()
        if i == 6:
            break

    # Create a new dataset
    dataset_2 = StreamingDataset(local='cache', remote='path', batch_size=1)
    dataloader_2 = StreamingDataLoader(dataset_2, batch_size=1)

    # Load in the state dict that was previously saved
    dataloader_2.load_state_dict(state_dict)

    # Iterate over the dataset, which will start from batch 5 now.
    for i, batch in enumerate(dataloader_2):
        print(i, batch['x'], batch['y'])
"""
"""This is the documentation's example, word for word."""


def test_the_documented_example_runs_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The example of the documentation, with only its paths changed, resumes at batch 5 and loses no batch."""
    from lightning_faulttolerant.streaming.format.writer import MDSWriter

    with MDSWriter(out=str(tmp_path / "remote"), columns={"x": "int", "y": "int"}) as writer:
        for number in range(20):
            writer.write({"x": number, "y": -number})
    paths = {"/tmp/cache": "cache-1", "s3://remote/dataset": "remote", "'cache'": "'cache-2'", "'path'": "'remote'"}
    script = textwrap.dedent(EXAMPLE)
    for written, own in paths.items():
        path = str(tmp_path / own.strip("'"))
        script = script.replace(written, f"'{path}'" if "'" in written else path)
    names = {"StreamingDataset": StreamingDataset, "StreamingDataLoader": StreamingDataLoader}
    exec(script, names)
    printed = re.findall(r"(\d+) tensor\(\[(\d+)\]\) tensor\(\[(-?\d+)\]\)", capsys.readouterr().out)
    assert [(int(i), int(x), int(y)) for i, x, y in printed] == [
        *((i, i, -i) for i in range(7)),
        *((i, 5 + i, -5 - i) for i in range(15)),
    ]


def _loader(directory: str, *, batch_size: int = 8, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(StreamingDataset(directory, shuffle=True), batch_size=batch_size, **options)


@pytest.fixture
def directory(tmp_path: Path) -> str:
    """Return a data set of 101 samples."""
    return write(tmp_path / "data", 101)


def _taken(loader: StreamingDataLoader, num_batches: int) -> list[list[int]]:
    taken = []
    for batch in loader:
        taken.append(batch["n"].tolist())
        if len(taken) == num_batches:
            break
    return taken


def _place(state: dict[str, Any]) -> tuple[int, int]:
    return state["epoch"], state["sample_in_epoch"]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_only_batches_that_were_handed_out_count(directory: str, num_workers: int) -> None:
    """The state after each batch counts the batches so far, whatever the workers have fetched ahead."""
    loader = _loader(directory, num_workers=num_workers)
    assert _place(loader.state_dict()) == (0, 0)
    places = [_place(loader.state_dict()) for _ in loader]
    assert places == [*((0, 8 * (i + 1)) for i in range(12)), (1, 0)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_loaded_before_the_first_batch_takes_effect(directory: str, num_workers: int) -> None:
    """An existing iterator that has not yet yielded a batch begins at the place that is loaded."""
    saved = _loader(directory)
    first = _taken(saved, 4)
    loader = _loader(directory, num_workers=num_workers)
    made = iter(loader)
    loader.load_state_dict(saved.state_dict())
    assert first + batches(made) == batches(_loader(directory))
    assert _place(loader.state_dict()) == (1, 0)


def test_a_state_loaded_after_a_batch_ends_the_iterator(directory: str) -> None:
    """An iterator that has yielded batches raises after a state was loaded, since it would silently jump."""
    loader = _loader(directory)
    made = iter(loader)
    next(made)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StreamingError, match="after 1 batches"):
        next(made)
    assert len(batches(loader)) == 12


def test_a_last_batch_that_is_dropped_is_the_end_of_the_epoch(directory: str) -> None:
    """With drop_last, the state after the last full batch is the next epoch's beginning, not an empty rest."""
    loader = _loader(directory, drop_last=True)
    first = batches(loader)
    assert [len(batch) for batch in first] == [8] * 12
    assert _place(loader.state_dict()) == (1, 0)
    resumed = _loader(directory, batch_size=50, drop_last=True)
    resumed.load_state_dict({**loader.state_dict(), "epoch": 0, "sample_in_epoch": 64})
    assert [len(batch) for batch in batches(resumed)] == [50, 50]


def test_samples_without_batches_are_counted(directory: str) -> None:
    """With batch_size=None each sample is handed out and counted alone, with workers in their turn."""
    loader = _loader(directory, batch_size=None, num_workers=2)
    read = []
    for sample in loader:
        read.append(sample["n"])
        if len(read) == 33:
            break
    assert _place(loader.state_dict()) == (0, 33)
    resumed = _loader(directory, batch_size=None)
    resumed.load_state_dict(loader.state_dict())
    assert read + numbers(resumed) == numbers(_loader(directory))


def _packed(samples: Any) -> Any:
    for first, second in zip(samples, samples, strict=False):
        yield {"n": first["n"] + second["n"]}


OWN: dict[str, tuple[Any, bool]] = {
    "generated": (lambda samples: (yield from samples), True),  # it begins with the request for its first sample
    "mapped": (lambda samples: map(dict, samples), True),
    "filtered": (lambda samples: (sample for sample in samples if sample["n"] < 10 or sample["n"] % 5), False),
    "packed": (_packed, False),
    "multiplied": (lambda samples: (sample for sample in samples for _ in range(2)), False),
    "delayed": (lambda samples: (sample for sample, _ in itertools.pairwise(samples)), False),
}


@pytest.mark.parametrize("kind", OWN)
def test_a_data_set_that_changes_the_number_of_samples_has_no_wrong_position(tmp_path: Path, kind: str) -> None:
    """At each batch, the state is exact or refused, and then ResumableDataLoader's is exact."""
    changes, keeps_number = OWN[kind]
    own = type("Own", (StreamingDataset,), {"__iter__": lambda self: changes(StreamingDataset.__iter__(self))})
    write(tmp_path, 36)

    def loader(of: type[Any] = StreamingDataLoader) -> Any:
        return of(own(tmp_path, batch_size=4), batch_size=4)

    whole, refused, running = batches(loader()), list[str](), loader()
    for number, _ in enumerate(running, start=1):
        try:
            state = running.state_dict()
        except StreamingError as error:
            refused.append(str(error))
            continue
        resumed = loader()
        resumed.load_state_dict(state)
        assert batches(resumed) == (whole[number:] or whole)
    assert bool(refused) != keeps_number
    assert all("ResumableDataLoader" in error for error in refused)
    assert running.state_dict()["sample_in_epoch"] == 0
    first, second = loader(ResumableDataLoader), loader(ResumableDataLoader)
    for _ in itertools.islice(first, number // 2):
        state = first.state_dict()
    second.load_state_dict(state)
    assert batches(second) == whole[number // 2 :]
