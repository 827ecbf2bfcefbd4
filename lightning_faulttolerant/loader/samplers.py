"""The positions of a loader's samplers: the epoch that was set, and all that this package's samplers keep besides.

The samplers of a loader, and their name for the comparison of loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.samplers.progress import Interruptible


def is_interruptible(sampler: Any) -> bool:
    """Return whether `sampler` is one of this package's: its order follows from seed and epoch, not from draws."""
    return isinstance(sampler, Interruptible) and type(sampler).__module__.startswith("lightning_faulttolerant.")


def epochs_of(samplers: Sequence[Any]) -> list[Any]:
    """Return the epoch of each sampler. For this package's samplers, return their whole position."""
    return [s.progress_state() if is_interruptible(s) else getattr(s, "epoch", None) for s in samplers]


def put_epochs(samplers: Sequence[Any], epochs: Sequence[Any]) -> None:
    """Set the samplers to the positions that `epochs_of` returned."""
    for sampler, epoch in zip(samplers, epochs, strict=False):
        if isinstance(epoch, dict):
            sampler.load_progress_state(epoch)
        elif epoch is not None:
            sampler.set_epoch(epoch)


def epoch_in(epochs: Sequence[Any]) -> int | None:
    """Return the first epoch in a list of `epochs_of`."""
    found = (epoch["epoch"] if isinstance(epoch, dict) else epoch for epoch in epochs if epoch is not None)
    return next(found, None)


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
