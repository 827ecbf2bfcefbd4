"""The positions of a loader's samplers: the epoch that was set, and all that this package's samplers keep besides.

The samplers of a loader, and their name for the comparison of loaders.

States that user objects keep, through ``state_dict`` and ``load_state_dict``, of plain values and tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.samplers.progress import Interruptible
from lightning_faulttolerant.state.objects.kinds import follow_protocol


def is_interruptible(sampler: object) -> bool:
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


def index_sampler(loader: DataLoader[object]) -> Any:
    """Return the sampler that torch's iterators draw from: the batch sampler, or the sampler without batching."""
    return loader._index_sampler


def sampler_name(loader: DataLoader[object]) -> str:
    """Return the classes of the batch sampler and of the sampler of a loader."""
    batch_sampler = type(loader.batch_sampler).__name__ if loader.batch_sampler is not None else "no batching"
    return f"{batch_sampler} over {type(inner_sampler(loader)).__name__}"


def inner_sampler(loader: DataLoader[object]) -> object:
    """Return the sampler that supplies the indices of a loader's batches."""
    return getattr(loader.batch_sampler, "sampler", loader.sampler)


_PLAIN = (int, float, str, bytes, torch.Tensor, type(None))


def has_state(value: Any) -> bool:
    """Return whether `value` keeps a state that a checkpoint can hold."""
    return has_state_methods(value) and what_is_not_plain(value.state_dict()) is None


def has_state_methods(value: object) -> bool:
    """Return whether `value` has both methods, with the arguments of torch's protocol."""
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) for method in methods) and follow_protocol(*methods)


def what_is_not_plain(value: object, path: str = "") -> str | None:
    """Return the place and the type of the first value in a state that a checkpoint can't hold safely, or ``None``."""
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, (str, int))]
        if strange:
            return f"the key {strange[0]!r}{path and ' in ' + path}"
        found = (what_is_not_plain(child, f"{path}.{key}" if path else str(key)) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        found = (what_is_not_plain(child, f"{path}[{i}]") for i, child in enumerate(value))
    else:
        return None if isinstance(value, _PLAIN) else f"a {type(value).__name__} as {path or 'the whole state'}"
    return next((place for place in found if place is not None), None)


def state_of(value: Any) -> Any:
    """Return a copy of the state that `value` keeps now."""
    return copy.deepcopy(value.state_dict())
