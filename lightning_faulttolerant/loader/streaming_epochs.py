"""Streaming data sets of this package in a loader that is followed: the epoch of each, between samples.

The iterator reports the position of an iteration itself, in its own process. This module holds what the main process
knows: where the current iteration began, and where the next one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare
from lightning_faulttolerant.streaming.dataset import StreamingDataset
from lightning_faulttolerant.streaming.loader import StreamingDataLoader
from lightning_faulttolerant.streaming.ordering import Seeding

_DEPTH = 3

# The followers of a data set's loaders: several loaders may share one object, which counts their epochs together.
_followers: weakref.WeakKeyDictionary[StreamingDataset, weakref.WeakSet[StreamedEpochs]] = weakref.WeakKeyDictionary()


def is_streaming_loader(loader: object) -> bool:
    """Return whether `loader` is a ``StreamingDataLoader``: its position is kept here, not by its own state."""
    return isinstance(loader, StreamingDataLoader)


def streams_of(dataset: object, depth: int = _DEPTH) -> list[StreamingDataset]:
    """Return the streaming data sets that `dataset` is or holds."""
    if isinstance(dataset, StreamingDataset):
        return [dataset]
    if not depth or not isinstance(dataset, Dataset):
        return []
    held = (child for value in list(vars(dataset).values()) for child in _items(value))
    return [stream for child in held for stream in streams_of(child, depth - 1)]


def _items(value: object) -> Iterator[object]:
    yield from value if isinstance(value, (list, tuple)) else (value,)


class StreamedEpochs:
    """The epochs of the streaming data sets of one loader.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._streams = streams_of(loader.dataset) if isinstance(loader.dataset, IterableDataset) else []
        self._has_positions = is_streaming_loader(loader)
        self._is_direct = isinstance(loader.dataset, StreamingDataset)
        self._loader_batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self.is_dealt = self._is_direct and self._is_flat(loader)
        """Whether all ranks together consume the beginning of an order that any number of ranks can continue."""
        self._begun: list[dict[str, Any]] = []
        self._resumed: Sequence[Mapping[str, object]] = ()
        for stream in self._streams:
            _followers.setdefault(stream, weakref.WeakSet()).add(self)

    def _is_flat(self, loader: DataLoader[object]) -> bool:
        stream = self._streams[0]
        if stream.replication or type(stream).__iter__ is not StreamingDataset.__iter__:
            return False
        return self._has_positions or loader.num_workers <= 1 or stream.batch_size == (loader.batch_size or 1)

    def share(self, *, rank: int, num_ranks: int) -> RankShare:
        """Return how the samples are distributed to a rank."""
        return RankShare(rank=rank, num_ranks=num_ranks, batch_size=self._loader_batch_size, drop_last=self._drop_last)

    def order(self) -> GlobalOrder:
        """Return the order of an epoch, as positions. The data set itself maps them to samples."""
        return GlobalOrder(length=self._streams[0].num_positions, shuffles=False)

    def begin(self) -> None:
        """Note where the iteration begins that is being created."""
        # A StreamingDataLoader has begun it already. With any other loader, its iterator does so when it is created.
        if not self._has_positions:
            self.continue_epochs()
        self._begun = [_place(s, *(s.book.place if self._has_positions else s.book.next_place)) for s in self._streams]
        self._resumed = ()

    def continue_epochs(self) -> None:
        """Let the loaded iteration begin at its own position, wherever another loader of the data set must begin."""
        self._put(self._resumed)

    def take_back(self) -> None:
        """Let an iteration that was requested but not created be the next one again."""
        if self._has_positions:
            for stream in self._streams:
                stream.book.put(*stream.book.place, stream.book.seeding)

    def note_dropped(self) -> None:
        """Note that batches were taken that the loader itself does not count."""
        for stream in self._streams:
            stream.book.note(*stream.book.place, is_moved=True)

    def state_dict(self, *, in_iteration: bool) -> list[dict[str, object]]:
        """Return where each data set begins an iteration: the current one or the next one.

        Raises:
            NotExactError: If other code has begun another iteration in between.
        """
        if not in_iteration or not self._begun:
            return [_place(stream, *stream.book.next_place) for stream in self._streams]
        for stream, begun in zip(self._streams, self._begun, strict=True):
            # An object that holds its own data set may iterate over it any number of times.
            is_counted = self._is_direct or len(_followers[stream]) > 1
            epoch, _ = stream.book.next_place
            if is_counted and epoch not in (begun["epoch"], begun["epoch"] + 1):
                raise NotExactError(
                    f"Epoch {begun['epoch']} of a StreamingDataset is in progress, and another loader has begun epoch "
                    f"{epoch - 1} of the same object. The next epoch can't be determined. Give each loader its own "
                    "StreamingDataset."
                )
        return [{**place, "is_begun": True} for place in self._begun]

    def load_state_dict(self, places: Sequence[Mapping[str, object]]) -> None:
        """Let the next iterations begin at these positions. An iteration that had begun continues."""
        self._resumed = [place for place in places if place.get("is_begun")]
        self._put(places)

    def _put(self, places: Sequence[Mapping[str, Any]]) -> None:
        for stream, place in zip(self._streams, places, strict=False):
            seeding = Seeding(
                seed=place["seed"], num_canonical_nodes=place["num_canonical_nodes"], initial_nodes=place["nodes"]
            )
            stream.book.put(place["epoch"], place["sample"], seeding)


def _place(stream: StreamingDataset, epoch: int, sample: int) -> dict[str, object]:
    seeding = stream.book.seeding
    return {
        "epoch": epoch,
        "sample": sample,
        "seed": seeding.seed,
        "num_canonical_nodes": seeding.num_canonical_nodes,
        "nodes": seeding.initial_nodes,
    }
