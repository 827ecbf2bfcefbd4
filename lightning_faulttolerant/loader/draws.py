"""A sampler's draws in the middle of an epoch: started again, it yields the same indices although others drew too.

A sampler may draw from a generator that the training also draws from. Started again and run through, it then yields
other indices. So the state of that generator is kept for each batch before which other code had moved it. It is kept as
the difference from the previous one: most draws change a few bytes of thousands.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping

from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_faulttolerant.loader.samplers import is_interruptible

_ENTRY = struct.Struct("<qqq")  # batch, length of the generator's name, length of the compressed difference
_DRAW_ONCE = (DistributedSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

States = Mapping[str, bytes]


class DrawLog:
    """States of the generators that a sampler drew from, by batch."""

    def __init__(self, packed: bytes = b"") -> None:
        self._entries = [packed] if packed else []
        self._kept: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        for _, states in self.states():
            self._kept.update(states)

    def note(self, batch: int, before: States, after: States) -> None:
        """Note the states before and after the sampler yielded `batch`."""
        for name, state in before.items():
            if after.get(name) == state:
                continue
            if batch and self._left.get(name) != state:  # the first batch's states are kept anyway
                self._add(batch, name, state)
            self._left[name] = after.get(name, b"")

    def _add(self, batch: int, name: str, state: bytes) -> None:
        difference = zlib.compress(_xor(state, self._kept.get(name, b"")), 1)
        encoded = name.encode()
        self._entries.append(_ENTRY.pack(batch, len(encoded), len(difference)) + encoded + difference)
        self._kept[name] = state

    def states(self) -> Iterator[tuple[int, dict[str, bytes]]]:
        """Yield each batch with the states to restore before the sampler yields it, in order."""
        data = b"".join(self._entries)
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
        data = b"".join(self._entries)
        offset = 0
        while offset < len(data):
            noted, name_bytes, difference_bytes = _ENTRY.unpack_from(data, offset)
            if noted >= batch:
                break
            offset += _ENTRY.size + name_bytes + difference_bytes
        return DrawLog(data[:offset])

    def pack(self) -> bytes:
        """Return the log as bytes, for `DrawLog`."""
        return b"".join(self._entries)


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
