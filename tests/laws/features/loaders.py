"""Loaders of torch: samplers, workers, functions of the users, and several loaders in one training."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

from tests.laws.data_sets import (
    CountingDataset,
    DrawingSampler,
    HoldingDataset,
    LazyDataset,
    MappingLoader,
    NoisyCollate,
    NoisyDataset,
    UnpackingLoader,
    Unsized,
    counted,
    drawing_worker_init,
)
from tests.laws.rows import add, add_loader, row, rows_of

add_loader("shuffled", rows_of(24))
add_loader("two workers", rows_of(32, num_workers=2))
add_loader("persistent workers", rows_of(32, num_workers=2, persistent_workers=True))
add_loader("in order, to an incomplete batch", rows_of(23, shuffle=False))
add_loader("own generator", lambda: rows_of(24, generator=torch.Generator().manual_seed(0))())
add_loader("drawing sampler", lambda: rows_of(24, shuffle=False, sampler=DrawingSampler(24))(), part="rng")
add_loader("generator on first use", lambda: DataLoader(LazyDataset(has_attribute=False), batch_size=4, shuffle=True))
add_loader("iter that unpacks", lambda: UnpackingLoader(NoisyDataset(24), batch_size=4, shuffle=True))
add_loader("iter that maps", lambda: MappingLoader(NoisyDataset(24), batch_size=4, shuffle=True))
add_loader("no length", lambda: Unsized(NoisyDataset(24), batch_size=4, sampler=DrawingSampler(24)), apart="ahead")
add_loader("counting data set and sampler with states", counted, apart="counts", ranks=False, part="objects")
add_loader("counting data set in workers", lambda: DataLoader(CountingDataset(), 4, shuffle=True, num_workers=2))


@row("train", part="loaders", shows="content")
def batches_of_indices() -> DataLoader[Tensor]:
    """A batch sampler is the sampler of a loader that does not batch."""

    class Rows(NoisyDataset):
        def __getitem__(self, index: list[int]) -> Tensor:  # type: ignore[override]
            return torch.stack([super(Rows, self).__getitem__(i) for i in index])

    return DataLoader(Rows(24), batch_size=None, sampler=BatchSampler(RandomSampler(range(24)), 4, drop_last=False))


@row("train", part="loaders", shows="content")
def seeded_by_lightning() -> DataLoader[Tensor]:
    """Three workers that Lightning seeds are far past each cut."""
    os.environ["PL_SEED_WORKERS"] = "1"  # as seed_everything(workers=True) does
    return DataLoader(NoisyDataset(24), batch_size=4, shuffle=True, num_workers=3, prefetch_factor=5)


@row("train", part="loaders", shows="content")
def functions_that_draw() -> DataLoader[Tensor]:
    """A ``worker_init_fn`` and a ``collate_fn`` draw in persistent workers."""
    functions = {"worker_init_fn": drawing_worker_init, "collate_fn": NoisyCollate()}
    return DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, **functions)


# A part of the batches.

add_loader(
    "6 batches of a loader without a length",
    lambda: Unsized(HoldingDataset(48), 4, shuffle=True, num_workers=2, persistent_workers=True),
    trainer={"limit_train_batches": 6},
    apart="ahead",
)
add_loader("overfit", lambda: DataLoader(HoldingDataset(48), 4), trainer={"overfit_batches": 6}, alone=True)
add(
    "part of the validation",
    part="loaders",
    shows="content",
    validation=rows_of(16, num_workers=2, persistent_workers=True),
    trainer={"limit_val_batches": 0.5, "val_check_interval": 3},
)


# Several loaders. Those of the rows of a group are joined, and all but the longest are cycled.


def pair(long: int = 24, short: int = 12) -> dict[str, DataLoader[Any]]:
    """Return a long and a short loader."""
    return {"long": rows_of(long)(), "short": DataLoader(HoldingDataset(short), batch_size=4, shuffle=True)}


add_loader("nested", lambda: [rows_of(20)(), pair()])
add_loader("ends with the shortest", lambda: CombinedLoader(pair(40, 24), "min_size"), alone=True)
add_loader("until all have ended", lambda: CombinedLoader(pair(), "max_size"), alone=True)
add_loader(
    "no length, beside a cycled one",
    lambda: {**pair(), "long": Unsized(HoldingDataset(24), batch_size=4)},
    apart="ahead",
)
add_loader("tensors", lambda: [torch.arange(96.0).reshape(6, 4, 4)], part="", shows=())
