"""Data sets of Hugging Face, webdataset, lhotse, and LitData. Their own states are not trusted: they are replayed."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.laws.data_sets import noise
from tests.laws.rows import add, row


def of(library: str, **values: Any) -> dict[str, Any]:
    """Return the arguments of a row of a library."""
    return {"part": "loaders", "shows": "content", "ranks": False, "imports": library, "apart": "ahead", **values}


# Hugging Face.


def stacked(rows: list[dict[str, Any]]) -> Tensor:
    """Collate rows into a batch."""
    return torch.stack([torch.as_tensor(each["x"], dtype=torch.float32) for each in rows])


def sharded_rows(shards: list[int]) -> Iterator[dict[str, list[float]]]:
    """Yield the rows of some shards; each has 6."""
    every = np.linspace(-1, 1, 96).reshape(24, 4).tolist()
    for shard in shards:
        yield from ({"x": each} for each in every[shard * 6 : (shard + 1) * 6])


def noisy_row(row: dict[str, Any]) -> dict[str, Any]:
    """Add noise to a row."""
    return {"x": np.asarray(row["x"]) + noise()}


def table() -> Any:
    """Return rows in memory."""
    import datasets

    return datasets.Dataset.from_dict({"x": [each["x"] for each in sharded_rows([0, 1, 2, 3])]})


def shuffled_stream() -> Any:
    """Return a stream of four shards with a shuffle buffer, which the stream's own state lacks."""
    import datasets

    stream = datasets.IterableDataset.from_generator(sharded_rows, gen_kwargs={"shards": [0, 1, 2, 3]})
    return stream.shuffle(seed=3, buffer_size=6).map(noisy_row)


add(
    "shuffled stream",
    train=lambda: DataLoader(shuffled_stream(), 4, num_workers=2, collate_fn=stacked),
    **of("datasets"),
)


@row("train", **of("datasets", warns="'set_vital' is deprecated"))
def stream_in_a_stateful_loader() -> Any:
    """A loader of torchdata would continue from the stream's own state."""
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


@row("train", **of("webdataset"))
def seeded_pipeline() -> DataLoader[Any]:
    """A pipeline with seeds, as in webdataset's documentation."""
    import webdataset

    return DataLoader(webdataset.WebDataset(tars(), shardshuffle=4, seed=1).shuffle(8, seed=2).map(decoded), 4)


# Lhotse and LitData.


class Speech(Dataset[Tensor]):
    """Fetches a whole batch by its cuts, and draws for each."""

    def __getitem__(self, cuts: Any) -> Tensor:
        rows = [[float(cut.id.split("-")[-1]), cut.duration, cut.start, noise()] for cut in cuts]
        return torch.tensor(rows * 2)  # a batch may have a single cut


@row("train", **of("lhotse.dataset", warns="You are using Dynamic.*Sampler with an eagerly read CutSet"))
def sets_of_cuts() -> DataLoader[Any]:
    """A sampler of lhotse yields sets of cuts of one to two seconds."""
    from lhotse import CutSet
    from lhotse.dataset import DynamicBucketingSampler
    from lhotse.testing.dummies import dummy_cut

    cuts = CutSet.from_cuts(dummy_cut(i, duration=1 + i * 7 % 10 / 10, recording_duration=3) for i in range(24))
    sampler = DynamicBucketingSampler(cuts, max_duration=6.0, num_buckets=2, shuffle=True)
    return DataLoader(Speech(), sampler=sampler, batch_size=None)


def chunks() -> str:
    """Return a directory of LitData, which each start finds where the first one put it."""
    from litdata.streaming.cache import Cache

    directory = Path("chunks").absolute()
    if not directory.exists():
        cache = Cache(str(directory), chunk_size=5)
        for n in range(24):
            cache[n] = n
        cache.done(), cache.merge()
    return str(directory)


def jittered(n: int) -> Tensor:
    """Return a sample with noise."""
    return torch.full((4,), n / 16) + torch.randn(4)


@row("train", **of("litdata", apart=""))
def litdata_stream() -> DataLoader[Any]:
    """A loader of torch reads LitData's data set."""
    import litdata

    return DataLoader(litdata.StreamingDataset(chunks(), shuffle=True, transform=jittered), batch_size=4)
