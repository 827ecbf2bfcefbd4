"""Streaming data sets in a loader that is followed: those of this package, and those of other libraries, by name.

The streaming data set of this package reports the position of an iteration itself, in its own process. This module
holds what the main process knows: where the current iteration began, and where the next one begins.

None of the other libraries need be installed. The streaming data sets of MosaicML Streaming and LitData count their
epochs themselves, and begin another one with each iteration. The count is kept here, so an iteration begins again as
the same epoch. Its consumed samples are drawn and dropped in the workers. The random states are saved by this package.
The libraries' own states hold no random states, and are not used.

Data sets of Hugging Face and pipelines of webdataset may lack what an exact resume needs. Without a seed, webdataset's
shuffle is seeded by the clock and the process id, so its samples can't be drawn again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.remaining import GlobalOrder, RankShare
from lightning_faulttolerant.streaming import is_loader_class, is_plain_stream, is_stream

if TYPE_CHECKING:
    from lightning_faulttolerant.streaming.dataset import StreamingDataset

_DEPTH = 3
_MAX_ITEMS = 1_000

MOSAIC, LITDATA = "MosaicML Streaming", "LitData"
_DATA_SETS = {
    ("streaming.base.dataset", "StreamingDataset"): MOSAIC,
    ("litdata.streaming.dataset", "StreamingDataset"): LITDATA,
}
_LOADERS = {
    ("streaming.base.dataloader", "StreamingDataLoader"): MOSAIC,
    ("litdata.streaming.dataloader", "StreamingDataLoader"): LITDATA,
}
_FILLED_BY_A_THREAD = {("monai.data.dataset", "SmartCacheDataset"): "MONAI"}


def library_of(dataset: object) -> str | None:
    """Return the library of a streaming data set, or ``None`` if it is none of these."""
    return _found(type(dataset), _DATA_SETS)


def is_loader_of(user_class: type) -> bool:
    """Return whether a class of loaders belongs to one of these libraries, or is derived from one that does."""
    return _found(user_class, _LOADERS) is not None


def _found(kind: type, names: Mapping[tuple[str, str], str]) -> str | None:
    return next((names[key] for base in kind.__mro__ if (key := (base.__module__, base.__name__)) in names), None)


def why_not_followed(loader: Any) -> str | None:
    """Return why a loader of these libraries, or over their data sets, can't be followed, or ``None`` if it can."""
    dataset = loader.dataset
    if _found(type(dataset), _FILLED_BY_A_THREAD) is not None:
        return (
            f"a thread of its {type(dataset).__name__} loads the next items while training continues, and how far it "
            "has come can't be restored. Use MONAI's CacheDataset, with a smaller cache_rate if the memory is short"
        )
    if library_of(dataset) is not None:
        return None
    library = LITDATA if is_loader_of(type(loader)) else _library_held(dataset, _DEPTH)
    if library is None:
        return None
    return (
        f"its {type(dataset).__name__} passes on the samples of streaming data sets of {library}, so their epochs "
        "can't be set. Give the loader the StreamingDataset itself; a subclass may change the samples"
    )


def _library_held(dataset: object, depth: int) -> str | None:
    if not depth or not isinstance(dataset, IterableDataset):
        return None
    found = (library_of(child) or _library_held(child, depth - 1) for child in _held_by(dataset))
    return next((library for library in found if library is not None), None)


def _held_by(dataset: object) -> Iterator[object]:
    """Yield the attributes of a data set, and the items of those that are lists."""
    for value in list(vars(dataset).values()):
        yield from value[:_MAX_ITEMS] if isinstance(value, (list, tuple)) else (value,)


class ForeignEpochs:
    """The count of epochs of one loader's data set, if it belongs to one of these libraries.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._copy: weakref.ref[object] | None = None
        self.library = library_of(loader.dataset)
        self._dataset = loader.dataset
        self._counts_itself = self.library == LITDATA and is_loader_of(type(loader))
        self._begun: int | None = None

    def follow(self, copy: object) -> None:
        """Count with the followed copy of the loader. It is not referenced, so no cycle keeps its workers alive."""
        self._copy = weakref.ref(copy)

    def begin(self) -> None:
        """Note the epoch of the iteration that is being created."""
        if self.library is not None:
            # LitData's loader counts before this point; MosaicML's data set counts when its workers begin.
            self._begun = self._next() - self._counts_itself

    def take_back(self) -> None:
        """Let an iteration that was requested but not created be the next one again."""
        if self._counts_itself:
            self._loader.current_epoch -= 1

    def state_dict(self, *, in_iteration: bool) -> dict[str, object]:
        """Return the current epoch, or the next one."""
        if self.library is None:
            return {}
        epoch = self._begun if in_iteration else self._next()
        return {"library": self.library, "epoch": epoch}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next iteration be the epoch in `state`."""
        if self.library is None or state.get("library") != self.library:
            return
        if self.library == MOSAIC:
            self._dataset.next_epoch = state["epoch"]
        elif self._counts_itself:
            self._loader.current_epoch = state["epoch"]
        else:
            self._dataset.set_epoch(state["epoch"])

    @property
    def _loader(self) -> Any:
        return None if self._copy is None else self._copy()

    def _next(self) -> int:
        if self.library == MOSAIC:
            return int(self._dataset.next_epoch)
        return int(self._loader.current_epoch if self._counts_itself else self._dataset.current_epoch)


_LOOKED_AT = 100  # of the attributes or items of one object


def is_hugging_face(value: object) -> bool:
    """Return whether `value` is an object of Hugging Face's library."""
    return type(value).__module__.startswith("datasets.")


def refills_its_buffer(value: object, depth: int = 3) -> bool:
    """Return whether `value` is or forwards a Hugging Face stream: the stream's state lacks its shuffle buffer."""
    if is_hugging_face(value):
        return True
    if isinstance(value, Mapping):
        held = list(value.values())
    else:
        held = list(value) if isinstance(value, (list, tuple)) else list(getattr(value, "__dict__", {}).values())
    return depth > 0 and any(refills_its_buffer(child, depth - 1) for child in held[:_LOOKED_AT])


def drawn_orders(dataset: object) -> dict[str, Sequence[object]]:
    """Return the orders of one of their data sets. `shuffle` without a seed draws them immediately."""
    indices = getattr(dataset, "_indices", None)
    if indices is not None:
        return {"indices": _Column(indices.column(0))}
    found: dict[str, Sequence[object]] = {}
    source, depth = getattr(dataset, "_ex_iterable", None), 0
    while source is not None:  # one wraps another: a buffer, a map, and finally the reader of the shards
        for name, value in (getattr(source, "kwargs", None) or {}).items():
            if isinstance(value, (list, tuple)) and " at 0x" not in str(value[:1]):
                found[f"source {depth} {name}"] = [_shard(item) for item in value]
        source, depth = getattr(source, "ex_iterable", None), depth + 1
    return found


def _shard(item: object) -> object:
    # Shards of a table look alike from outside. Their first rows differ, and reading them runs no data set code.
    table = getattr(item, "_data", None)
    return item if table is None else table.slice(0, 1).to_pydict()


class _Column(Sequence[Any]):
    """A column of a table as plain numbers, read one by one."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].as_py()


_MAX_STAGES = 5
_ROOT = "webdataset"
_RNG, _SEED = 2, 3  # among the arguments of its shuffle, after the data


def why_drawn_by_the_clock(dataset: object) -> str | None:
    """Return why the samples of a pipeline can't be drawn again, or ``None`` if they can."""
    for stage in _stages(dataset, _MAX_STAGES):
        kind = type(stage).__name__
        if kind == "FilterFunction" and getattr(stage.f, "__name__", "") == "_shuffle" and not _has_seed(stage):
            return f"its {type(dataset).__name__} shuffles without a seed, by the clock. Pass shuffle a seed"
        if kind == "ResampledShards" and not stage.deterministic:
            return (
                f"its {type(dataset).__name__} resamples its shards by the clock. Give it ResampledShards with"
                " deterministic=True"
            )
    return None


def _has_seed(shuffle: Any) -> bool:
    by_position = dict(zip((_RNG, _SEED), shuffle.args[_RNG : _SEED + 1], strict=False))
    given = (shuffle.kw.get("rng", by_position.get(_RNG)), shuffle.kw.get("seed", by_position.get(_SEED)))
    return any(value is not None for value in given)


def _stages(pipeline: object, depth: int) -> Iterator[Any]:
    if not depth:
        return
    for stage in list(vars(pipeline).get("pipeline", ())) if hasattr(pipeline, "__dict__") else ():
        if (type(stage).__module__ or "").partition(".")[0] == _ROOT:
            yield stage
        yield from _stages(stage, depth - 1)


# The followers of a data set's loaders: several loaders may share one object, which counts their epochs together.
_followers: weakref.WeakKeyDictionary[StreamingDataset, weakref.WeakSet[StreamedEpochs]] = weakref.WeakKeyDictionary()


def streams_of(dataset: object, depth: int = _DEPTH) -> list[StreamingDataset]:
    """Return the streaming data sets that `dataset` is or holds."""
    if is_stream(dataset):
        return [dataset]
    if not depth or not isinstance(dataset, Dataset):
        return []
    return [stream for child in _held_by(dataset) for stream in streams_of(child, depth - 1)]


class StreamedEpochs:
    """The epochs of the streaming data sets of one loader.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._streams = streams_of(loader.dataset) if isinstance(loader.dataset, IterableDataset) else []
        # The position of a StreamingDataLoader is kept here, not by its own state.
        self._has_positions = is_loader_class(type(loader))
        self._is_direct = is_stream(loader.dataset)
        self._loader_batch_size, self._drop_last = loader.batch_size, loader.drop_last
        self.is_dealt = self._is_direct and self._is_flat(loader)
        """Whether all ranks together consume the beginning of an order that any number of ranks can continue."""
        self._begun: list[dict[str, Any]] = []
        self._resumed: Sequence[Mapping[str, object]] = ()
        for stream in self._streams:
            _followers.setdefault(stream, weakref.WeakSet()).add(self)

    def _is_flat(self, loader: DataLoader[object]) -> bool:
        stream = self._streams[0]
        if stream.replication or not is_plain_stream(stream):
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
            book = stream.book
            seeding = replace(book.seeding, seed=place["seed"], num_canonical_nodes=place["num_canonical_nodes"])
            book.put(place["epoch"], place["sample"], seeding)


def _place(stream: StreamingDataset, epoch: int, sample: int) -> dict[str, object]:
    seeding = stream.book.seeding
    return {
        "epoch": epoch,
        "sample": sample,
        "seed": seeding.seed,
        "num_canonical_nodes": seeding.num_canonical_nodes,
    }
