"""Loaders of torch: samplers, workers, functions of the users, and several loaders in one training."""

from __future__ import annotations

import os
from collections.abc import Callable
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
from tests.laws.rows import add, row, rows_of


def carried(name: str, train: Callable[[], Any], **values: Any) -> None:
    """Add a loader whose batches our state of loaders carries."""
    add(name, **{"part": "loaders", "shows": "content", "train": train, **values})


carried("shuffled", rows_of(24))
carried("two workers", rows_of(32, num_workers=2))
carried("persistent workers", rows_of(32, num_workers=2, persistent_workers=True))
carried("in order, to an incomplete batch", rows_of(23, shuffle=False))
carried("own generator", lambda: rows_of(24, generator=torch.Generator().manual_seed(0))())
carried("drawing sampler", lambda: rows_of(24, shuffle=False, sampler=DrawingSampler(24))(), part="rng")
carried("generator on first use", lambda: DataLoader(LazyDataset(has_attribute=False), batch_size=4, shuffle=True))
carried("iter that unpacks", lambda: UnpackingLoader(NoisyDataset(24), batch_size=4, shuffle=True))
carried("iter that maps", lambda: MappingLoader(NoisyDataset(24), batch_size=4, shuffle=True))
carried("no length", lambda: Unsized(NoisyDataset(24), batch_size=4, sampler=DrawingSampler(24)), apart="ahead")
carried("counting data set and sampler with states", counted, apart="counts", ranks=False, part="objects")
carried("counting data set in workers", lambda: DataLoader(CountingDataset(), 4, shuffle=True, num_workers=2))


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

carried(
    "6 batches of a loader without a length",
    lambda: Unsized(HoldingDataset(48), 4, shuffle=True, num_workers=2, persistent_workers=True),
    trainer={"limit_train_batches": 6},
    apart="ahead",
)
carried("overfit", lambda: DataLoader(HoldingDataset(48), 4), trainer={"overfit_batches": 6}, alone=True)
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


carried("nested", lambda: [rows_of(20)(), pair()])
carried("ends with the shortest", lambda: CombinedLoader(pair(40, 24), "min_size"), alone=True)
carried("until all have ended", lambda: CombinedLoader(pair(), "max_size"), alone=True)
carried(
    "no length, beside a cycled one",
    lambda: {**pair(), "long": Unsized(HoldingDataset(24), batch_size=4)},
    apart="ahead",
)
carried("tensors", lambda: [torch.arange(96.0).reshape(6, 4, 4)], part="", shows=())
