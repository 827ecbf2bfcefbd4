"""The samplers of a loader: their epochs, their own states, and the generators that they draw from.

A sampler may draw from a generator that the training also draws from. Started again and run through, it then yields
other indices. So the state of that generator is kept for each batch before which other code had moved it. It is kept as
the difference from the previous one: most draws change a few bytes of thousands.
"""

from __future__ import annotations

import copy
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant.samplers.progress import Interruptible
from lightning_faulttolerant.state.objects.kinds import follow_protocol


def is_interruptible(sampler: object) -> bool:
    """Return whether `sampler` is one of this package's: its order follows from seed and epoch, not from draws."""
    return isinstance(sampler, Interruptible) and type(sampler).__module__.startswith("lightning_faulttolerant.")


def epochs_of(samplers: Sequence[Any]) -> list[object]:
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


_ENTRY = struct.Struct("<qqq")  # batch, length of the generator's name, length of the compressed difference
_DRAW_ONCE = (DistributedSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

States = Mapping[str, bytes]


class DrawLog:
    """States of the generators that a sampler drew from, by batch."""

    def __init__(self, packed: bytes = b"") -> None:
        self.entries = [packed] if packed else []
        """The packed notes. More are only appended."""
        self._kept: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        for _, states in self.states():
            self._kept.update(states)

    def note(self, batch: int, before: States, after: States) -> None:
        """Note the states before and after the sampler yielded `batch`."""
        if before == after:
            return
        for name, state in before.items():
            if after.get(name) == state:
                continue
            if batch and self._left.get(name) != state:  # the first batch's states are kept anyway
                self._add(batch, name, state)
            self._left[name] = after.get(name, b"")

    def _add(self, batch: int, name: str, state: bytes) -> None:
        difference = zlib.compress(_xor(state, self._kept.get(name, b"")), 1)
        encoded = name.encode()
        self.entries.append(_ENTRY.pack(batch, len(encoded), len(difference)) + encoded + difference)
        self._kept[name] = state

    def states(self) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield each batch with the states to restore before the sampler yields it, in order."""
        data = b"".join(self.entries)
        kept: dict[str, bytes] = {}
        found: tuple[int, dict[str, bytes]] | None = None
        offset = 0
        while offset < len(data):
            batch, name_bytes, difference_bytes = _ENTRY.unpack_from(data, offset)
            name_at = offset + _ENTRY.size
            offset = name_at + name_bytes + difference_bytes
            name = data[name_at : name_at + name_bytes].decode()
            kept[name] = _xor(zlib.decompress(data[name_at + name_bytes : offset]), kept.get(name, b""))
            if found is None or found[0] != batch:
                if found is not None:
                    yield found
                found = batch, {}
            found[1][name] = kept[name]
        if found is not None:
            yield found

    def until(self, batch: int) -> DrawLog:
        """Return the log of the batches before `batch`."""
        data = b"".join(self.entries)
        offset = 0
        while offset < len(data):
            noted, name_bytes, difference_bytes = _ENTRY.unpack_from(data, offset)
            if noted >= batch:
                break
            offset += _ENTRY.size + name_bytes + difference_bytes
        return DrawLog(data[:offset])

    def pack(self, num_entries: int | None = None) -> bytes:
        """Return the log as bytes, for `DrawLog`.

        Args:
            num_entries: Its length at an earlier moment, for the log as it was then. Default: as it is now.
        """
        return b"".join(self.entries[:num_entries])


_LIGHTNINGS_WRAPPER = "_IndexBatchSamplerWrapper"
"""It notes the indices of ``predict``, for prediction writers, and passes them on."""


def draws_only_at_its_start(sampler: object) -> bool:
    """Return whether torch's code shows that `sampler` makes no mid-epoch draws from a generator that others use."""
    sampler = _of_samples(sampler)
    if type(sampler) is RandomSampler:
        # It has its own generator, or makes one pass whose order is drawn at the start.
        one_pass = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
        return sampler.generator is None or one_pass
    return type(sampler) in _DRAW_ONCE or is_interruptible(sampler)


def order_follows_from_start(sampler: object) -> bool:
    """Return whether the length and the states at its start determine all that `sampler` yields.

    The states are those of its generator, or its seed and epoch. They are restored, and the length is compared.
    """
    sampler = _of_samples(sampler)
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    return type(sampler) in (SequentialSampler, DistributedSampler)


def _of_samples(sampler: object) -> object:
    """Return the sampler that yields single indices, if only torch's and Lightning's classes are around it."""
    if type(sampler).__name__ == _LIGHTNINGS_WRAPPER:
        sampler = vars(sampler).get("_batch_sampler")
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def generators_of(sampler: object) -> list[object]:
    """Return the generators that `sampler`, one of torch's, and the samplers inside it were given."""
    own = getattr(sampler, "generator", None)
    inner = getattr(sampler, "sampler", None)
    return ([] if own is None else [own]) + ([] if inner is None else generators_of(inner))


def _xor(state: bytes, other: bytes) -> bytes:
    size = len(state)
    other = other[:size].ljust(size, b"\0")
    return (int.from_bytes(state, "little") ^ int.from_bytes(other, "little")).to_bytes(size, "little")
