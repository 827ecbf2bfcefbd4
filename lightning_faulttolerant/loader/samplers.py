"""The samplers of a loader: their epochs, their own states, and the generators that they draw from.

A sampler may draw from a generator that the training also draws from. Started again and run through, it then yields
other indices. So the state of that generator is kept for each batch before which other code had moved it: as the
number of words that the other code drew, where it can be found, so that a checkpoint doesn't grow with each batch.
"""

from __future__ import annotations

import copy
import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, takewhile
from typing import Any, NamedTuple

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
from lightning_faulttolerant.state.twister import advanced, distance, lengthened, shortened

_log = logging.getLogger(__name__)


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


_HEAD = struct.Struct("<qqq")  # batch, length of the generator's name, length of the compressed difference
_MOST_BLOCKS = 1 << 15  # 20 million numbers
_LARGE_BYTES = 8 << 20
_LARGE = (
    "The position of a loader takes %.0f MB in each checkpoint, and grows with each batch: it draws from the generator "
    "%r, which other code seeds again between its draws. Give the sampler or data set its own generator."
)
_DRAW_ONCE = (DistributedSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

States = Mapping[str, bytes]


class Noted(NamedTuple):
    """A generator's state before a batch, as the difference from a base.

    That is the state after ``num_words`` more words than when the sampler left it, or else the one noted before.
    """

    batch: int
    name: str
    num_words: int | None
    base: bytes
    difference: bytes
    end: int

    def state(self, now: States) -> bytes:
        """Return the state, from the states that the sampler has left now."""
        base = self.base if self.num_words is None else advanced(now.get(self.name, b""), self.num_words)
        return _xor(zlib.decompress(self.difference), base) if self.difference else base


class DrawLog:
    """States of the generators that a sampler drew from, by batch.

    Training draws a similar number of words in each step. So an entry with a number counts its batch from the entry
    before: most entries are equal, and the log of a checkpoint, which is compressed, hardly grows.
    """

    def __init__(self, packed: bytes = b"") -> None:
        self.entries = [packed] if packed else []
        """The packed notes. More are only appended."""
        self._kept: dict[str, bytes] = {}
        self._left: dict[str, bytes] = {}
        self._last = 0
        self._num_bytes = len(packed)
        self._most_blocks: dict[str, int] = {}
        for noted in self.states():
            self._last = noted.batch
            if noted.num_words is None:
                self._kept[noted.name] = noted.state({})

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
        most = self._most_blocks.get(name, _MOST_BLOCKS)
        found = distance(self._left.get(name, b""), state, most_blocks=most)
        if found is None:
            self._most_blocks[name] = most // 16  # where training seeds it in each step, the search ends soon
            short = shortened(state)
            numbers, base = (short, state) if isinstance(short, list) else ([], self._kept.get(name, b""))
            self._kept[name] = state
        else:
            numbers, base = [found[0]], found[1]
        at = batch - self._last if numbers else batch
        key = "\0".join(map(str, (name, *numbers))).encode()
        self._last = batch
        difference = b"" if base == state else zlib.compress(_xor(state, base), 1)
        self.entries.append(_HEAD.pack(at, len(key), len(difference)) + key + difference)
        self._num_bytes += len(self.entries[-1])
        if self._num_bytes - len(self.entries[-1]) < _LARGE_BYTES <= self._num_bytes:
            _log.warning(_LARGE, self._num_bytes / 1e6, name)

    def states(self) -> Iterator[Noted]:
        """Yield the states to restore before the sampler yields a batch, in order."""
        packed, kept, batch, end = self.pack(), dict[str, bytes](), 0, 0
        while end < len(packed):
            at, key_bytes, difference_bytes = _HEAD.unpack_from(packed, end)
            key_at = end + _HEAD.size
            difference_at = key_at + key_bytes
            end = difference_at + difference_bytes
            name, *words = packed[key_at:difference_at].decode().split("\0")
            numbers = [int(word) for word in words]
            batch = batch + at if numbers else at
            base = lengthened(numbers) if len(numbers) == 2 else kept.get(name, b"")
            num_words = numbers[0] if len(numbers) == 1 else None
            noted = Noted(batch, name, num_words, base, packed[difference_at:end], end)
            if num_words is None:
                kept[name] = noted.state({})
            yield noted

    def by_batch(self) -> Iterator[tuple[int, Callable[[States], dict[str, bytes]]]]:
        """Yield each batch before which states are to be restored, in order, with a function that returns them.

        It takes the states that the sampler has left. One generator may have two names, so none is restored before all
        are known.
        """
        for batch, noted in groupby(self.states(), key=lambda noted: noted.batch):
            yield batch, partial(_states_of, list(noted))

    def until(self, batch: int) -> DrawLog:
        """Return the log of the batches before `batch`."""
        ends = [noted.end for noted in takewhile(lambda noted: noted.batch < batch, self.states())]
        return DrawLog(self.pack()[: ends[-1] if ends else 0])

    def pack(self, num_entries: int | None = None) -> bytes:
        """Return the log as bytes, for `DrawLog`.

        Args:
            num_entries: Its length at an earlier moment, for the log as it was then. Default: as it is now.
        """
        return b"".join(self.entries[:num_entries])


def _states_of(entries: Sequence[Noted], now: States) -> dict[str, bytes]:
    return {noted.name: noted.state(now) for noted in entries}


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
