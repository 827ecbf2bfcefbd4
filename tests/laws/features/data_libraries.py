"""Data sets of Hugging Face, webdataset, LitData, and MosaicML Streaming."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from tests.laws.data_sets import noise, of_kind
from tests.laws.features.streams import shards
from tests.laws.rows import add, row

# Hugging Face. A stream's own state lacks its shuffle buffer, so it isn't trusted: the stream is replayed.


def stacked(rows: list[dict[str, Any]]) -> Tensor:
    """Collate rows into a batch."""
    return torch.stack([torch.as_tensor(each["x"], dtype=torch.float32) for each in rows])


def sharded_rows(shards: list[int]) -> Iterator[dict[str, list[float]]]:
    """Yield the rows of some shards; each has 6."""
    every = np.linspace(-1, 1, 96).reshape(24, 4).tolist()
    for shard in shards:
        yield from ({"x": each} for each in every[shard * 6 : (shard + 1) * 6])


def noisy(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Add noise to rows, from all three global generators."""
    return {"x": [torch.as_tensor(each) + noise() for each in rows["x"]]}


def noisy_row(row: dict[str, Any]) -> dict[str, Any]:
    """Add noise to a row."""
    return {"x": np.asarray(row["x"]) + noise()}


def table() -> Any:
    """Return rows in memory."""
    import datasets

    return datasets.Dataset.from_dict({"x": [each["x"] for each in sharded_rows([0, 1, 2, 3])]})


def shuffled_stream() -> Any:
    """Return a stream of four shards with a shuffle buffer."""
    import datasets

    stream = datasets.IterableDataset.from_generator(sharded_rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    return stream.shuffle(seed=3, buffer_size=6).map(noisy_row)


class EpochLoader(DataLoader[Any]):
    """Is found by its kind."""


class TellsEpoch(Callback):
    """Sets the stream's epoch: each epoch has another order."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        [loader] = of_kind(trainer.train_dataloader, EpochLoader)
        loader.dataset.set_epoch(trainer.current_epoch)


class WrappedStream(IterableDataset[Any]):
    """Passes on a stream and its state, which lacks the shuffle buffer."""

    def __init__(self) -> None:
        self.stream = shuffled_stream()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.stream.load_state_dict(state_dict)


CARRIED: dict[str, Any] = {"part": "loaders", "shows": "content"}
add("table", train=lambda: DataLoader(table().with_transform(noisy), 4, shuffle=True, collate_fn=stacked), **CARRIED)
add(
    "stream of a table",
    train=lambda: DataLoader(
        table().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6), 4, num_workers=2, collate_fn=stacked
    ),
    **CARRIED,
)
add(
    "shuffled stream", callbacks=TellsEpoch,
    train=lambda: EpochLoader(shuffled_stream(), 4, collate_fn=stacked), **CARRIED,
)  # fmt: skip
add("wrapped stream", train=lambda: DataLoader(WrappedStream(), 4, collate_fn=stacked), **CARRIED)


@row("train", **CARRIED)
def stream_in_a_stateful_loader() -> Any:
    """A stream's state, from which torchdata would continue, lacks the buffer."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(shuffled_stream(), 4, collate_fn=stacked)


# Webdataset.


def tars() -> list[str]:
    """Return four tar files of 6 samples each, which each start finds where the first one put them."""
    directory = Path("tars").absolute()
    if not directory.exists():
        written = Path(tempfile.mkdtemp(dir="."))
        for shard in range(4):
            with tarfile.open(written / f"{shard:03d}.tar", "w") as file:
                for i in range(6):
                    buffer = io.BytesIO()
                    torch.save(torch.full((4,), float(shard * 6 + i)), buffer)
                    member = tarfile.TarInfo(f"{shard}-{i}.pth")
                    member.size = buffer.tell()
                    buffer.seek(0)
                    file.addfile(member, buffer)
        written.rename(directory)
    return sorted(map(str, directory.glob("*.tar")))


def decoded(sample: dict[str, Any]) -> Tensor:
    """Return a sample with noise from an augmentation."""
    return torch.load(io.BytesIO(sample["pth"])) + torch.randn(4)


@row("train", **CARRIED)
def seeded_pipeline() -> DataLoader[Any]:
    """A pipeline with seeds, as in webdataset's documentation."""
    import webdataset

    return DataLoader(webdataset.WebDataset(tars(), shardshuffle=4, seed=1).shuffle(8, seed=2).map(decoded), 4)


@row("train", **CARRIED)
def resampled_pipeline() -> DataLoader[Any]:
    """A pipeline of stages that draws its shards with replacement, and shuffles."""
    import webdataset

    stages = webdataset.tarfile_to_samples(), webdataset.shuffle(8, 2, None, 5), webdataset.map(decoded)
    shards = webdataset.ResampledShards(tars(), nshards=4, seed=4, deterministic=True)
    return DataLoader(webdataset.DataPipeline(shards, *stages), 4)


# LitData and MosaicML Streaming keep their epochs; their draws are ours.


@row("train", **CARRIED)
def litdata_stream() -> DataLoader[Any]:
    """LitData's data set in a loader of torch, with a transform that draws from its own generator."""
    import litdata
    from litdata.streaming.cache import Cache

    directory = Path("chunks").absolute()
    if not directory.exists():
        cache = Cache(str(directory), chunk_size=5)
        for n in range(24):
            cache[n] = n
        cache.done(), cache.merge()
    return DataLoader(litdata.StreamingDataset(str(directory), shuffle=True, transform=Jittered()), batch_size=4)


class Jittered:
    """A transform that draws from its own generator, and from a global one."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(7)

    def __call__(self, n: int) -> Tensor:
        return torch.full((4,), n / 16) + self.rng.normal() + torch.randn(4)


@row("train", **CARRIED)
def mosaic_stream() -> DataLoader[Any]:
    """The original library's loader over a shuffled data set that draws."""
    from tests.streaming.foreign import mosaic

    streaming = mosaic()

    class Rows(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Tensor:
            return torch.full((4,), super().__getitem__(at)["n"] / 16) + torch.randn(4)

    data = shards()
    for file in Path("/dev/shm").glob("*_locals"):  # what a killed start has left in shared memory
        with contextlib.suppress(OSError):
            if data.encode() in file.read_bytes():
                for left in Path("/dev/shm").glob(f"{file.name.removesuffix('locals')}*"):
                    left.unlink(missing_ok=True)
    tempfile.tempdir = tempfile.mkdtemp(dir=os.getcwd())  # the library's lock files are here, for each process
    return streaming.StreamingDataLoader(Rows(local=data, shuffle=True, batch_size=4), batch_size=4)
