"""The samplers of a loader, and their name for the comparison of loaders."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that torch's iterators draw from: the batch sampler, or the sampler without batching."""
    return loader._index_sampler


def sampler_name(loader: DataLoader[Any]) -> str:
    """Return the classes of the batch sampler and of the sampler of a loader."""
    batch_sampler = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batching"
    return f"{batch_sampler} over {type(inner_sampler(loader)).__name__}"


def inner_sampler(loader: DataLoader[Any]) -> Any:
    """Return the sampler that supplies the indices of a loader's batches."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)
