"""The libraries that read streaming data sets, each in its own process that lives through all rounds.

All libraries get the same samples, in files of their own format and of equal size.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context, set_start_method
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.floor import floor_loader

_POOL = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Data:
    """A data set of `num_samples` samples, each with one number and one array."""

    name: str
    num_samples: int
    dtype: str
    length: int
    shard_bytes: int
    batch_size: int

    def sample(self, number: int) -> dict[str, Any]:
        """Return one sample."""
        values = _pool(self.dtype, self.length)[number % _POOL].copy()
        values[0] = number % 251
        return {"number": number, "values": values}

    @property
    def columns(self) -> dict[str, str]:
        return {"number": "int", "values": f"ndarray:{self.dtype}:{self.length}"}


@cache
def _pool(dtype: str, length: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(0)
    return generator.integers(0, np.iinfo(dtype).max, (_POOL, length), dtype=dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The place from which a data set is read.

    Args:
        directory: The directory that it was written to.
        cache: An empty directory to copy it to, if it is read as a remote data set; ``None`` to read it in place.
    """

    directory: Path
    cache: Path | None = None


class Library(Protocol):
    """One library for reading."""

    format: str

    def write(self, data: Data, directory: Path) -> None:
        """Write all samples in its own format."""

    def loader(
        self, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int
    ) -> Iterable[dict[str, torch.Tensor]]:
        """Return a loader that continues at position `at` of the first epoch."""


class Plain:
    """The floor."""

    format = "mds"

    def write(self, data: Data, directory: Path) -> None:
        """Write with our own writer. Its files equal the original's files byte for byte."""
        from lightning_faulttolerant.streaming import MDSWriter

        with MDSWriter(out=str(directory), columns=data.columns, size_limit=data.shard_bytes) as writer:
            for number in range(data.num_samples):
                writer.write(data.sample(number))

    def loader(self, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int) -> Iterable[Any]:
        """Return a loader. If the data set is remote, copy all of it first: the floor can't fetch single shards."""
        if place.cache is not None:
            shutil.copytree(place.directory, place.cache, dirs_exist_ok=True)
        where = place.cache or place.directory
        return floor_loader(where, batch_size=data.batch_size, num_workers=num_workers, shuffle=shuffle, at=at)


class Ours(Plain):
    """This package."""

    def __init__(self) -> None:
        from lightning_faulttolerant import streaming

        self.streaming = streaming

    def loader(self, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int) -> Iterable[Any]:
        """Return our `StreamingDataLoader`."""
        return _of_streaming(self.streaming, data, place, num_workers=num_workers, shuffle=shuffle, at=at)


class Mosaic(Plain):
    """MosaicML Streaming."""

    def __init__(self) -> None:
        from tests.foreign import mosaic

        self.streaming = mosaic()

    def loader(self, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int) -> Iterable[Any]:
        """Return its `StreamingDataLoader`."""
        return _of_streaming(self.streaming, data, place, num_workers=num_workers, shuffle=shuffle, at=at)


def _of_streaming(
    streaming: Any, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int
) -> Iterable[Any]:
    """Return the loader of a library with these class names: the original's or ours."""
    where: dict[str, Any] = {"local": str(place.cache or place.directory)}
    if place.cache is not None:
        where["remote"] = str(place.directory)
    dataset = streaming.StreamingDataset(**where, shuffle=shuffle, batch_size=data.batch_size)
    loader = streaming.StreamingDataLoader(dataset, batch_size=data.batch_size, num_workers=num_workers)
    if at:
        state = loader.state_dict()
        loader.load_state_dict({**state, "epoch": 0, "sample_in_epoch": at, "num_canonical_nodes": 1})
    return loader  # type: ignore[no-any-return]


class LitData:
    """LitData, with files written by its own `optimize`."""

    format = "litdata"

    def __init__(self) -> None:
        import litdata

        self.litdata = litdata

    def write(self, data: Data, directory: Path) -> None:
        """Write the samples in one process."""
        self.litdata.optimize(
            fn=partial(_sample, data),
            inputs=list(range(data.num_samples)),
            output_dir=str(directory),
            chunk_bytes=data.shard_bytes,
            num_workers=1,
        )

    def loader(self, data: Data, place: Place, *, num_workers: int, shuffle: bool, at: int) -> Iterable[Any]:
        """Return its `StreamingDataLoader`."""
        if place.cache is None:
            dataset = self.litdata.StreamingDataset(str(place.directory), shuffle=shuffle)
        else:
            far = f"local:{place.directory}"
            dataset = self.litdata.StreamingDataset(far, cache_dir=str(place.cache), shuffle=shuffle)
        loader = self.litdata.StreamingDataLoader(dataset, batch_size=data.batch_size, num_workers=num_workers)
        if at:
            state = dataset.state_dict(at, num_workers, data.batch_size)
            loader.load_state_dict(
                {"dataset": state, "current_epoch": 1, "num_samples_yielded": at, "latest_worker_idx": 0}
            )
        return loader  # type: ignore[no-any-return]


def _sample(data: Data, number: int) -> dict[str, Any]:
    return data.sample(number)


LIBRARIES: dict[str, Callable[[], Library]] = {"ours": Ours, "mosaic": Mosaic, "litdata": LitData, "floor": Plain}


def throughput(
    library: Library, data: Data, directory: Path, *, num_workers: int, shuffle: bool, seconds: float
) -> float:
    """Return samples per second from the first batch of an epoch on, for `seconds` or to the end of the epoch."""
    loader = library.loader(data, Place(directory=directory), num_workers=num_workers, shuffle=shuffle, at=0)
    batches = iter(loader)
    next(batches)
    count = 0
    now = began = time.perf_counter()
    for batch in batches:
        count += len(batch["number"])
        now = time.perf_counter()
        if now - began > seconds:
            break
    return count / (now - began)


def first_batch(
    library: Library, data: Data, directory: Path, *, num_workers: int, at: float, cold: bool
) -> tuple[float, int]:
    """Return the seconds until a new loader has its first batch, and the number of shards fetched by then."""
    group = data.batch_size * max(1, num_workers)
    position = int(data.num_samples * at) // group * group
    with tempfile.TemporaryDirectory(dir=directory.parent, ignore_cleanup_errors=True) as temporary:
        place = Place(directory=directory, cache=Path(temporary) if cold else None)
        began = time.perf_counter()
        batches = iter(library.loader(data, place, num_workers=num_workers, shuffle=True, at=position))
        batch = next(batches)
        seconds = time.perf_counter() - began
        fetched = sum(path.suffix in (".mds", ".bin") for path in Path(temporary).rglob("*"))
        if len(batch["number"]) != data.batch_size:
            raise RuntimeError(f"The first batch has {len(batch['number'])} samples instead of {data.batch_size}.")
        del batches
        gc.collect()
    return seconds, fetched


def write(library: Library, data: Data, directory: Path) -> None:
    """Write a data set without output."""
    directory.mkdir(parents=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        library.write(data, directory)


class Served:
    """A library in its own process, which runs one call after the other."""

    def __init__(self, name: str, directory: Path) -> None:
        context = get_context("spawn")
        self.name = name
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(name, other, str(directory)))
        self._process.start()
        other.close()
        self.import_seconds: float = self._answer()
        self.format: str = self._answer()

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return the result of ``function(library, *arguments, **options)`` in that process."""
        self._connection.send((function, arguments, options))
        return self._answer()

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()

    def _answer(self) -> Any:
        done, value = self._connection.recv()
        if not done:
            raise RuntimeError(f"In the process of {self.name}:\n{value}")
        return value


def _serve(name: str, connection: Connection, directory: str) -> None:
    sys.path[:] = [path for path in sys.path if Path(path) != Path(__file__).parent]  # it has a streaming.py
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["LITDATA_CACHE_DIR"] = directory
    began = time.perf_counter()
    library = LIBRARIES[name]()
    connection.send((True, time.perf_counter() - began))
    connection.send((True, library.format))
    while (asked := connection.recv()) is not None:
        function, arguments, options = asked
        set_start_method(
            "fork", force=True
        )  # torch's default; a spawned process has another one, and so does `optimize`
        try:
            connection.send((True, function(library, *arguments, **options)))
        except Exception:  # noqa: BLE001 -- reported to the calling process
            connection.send((False, traceback.format_exc()))
        gc.collect()
