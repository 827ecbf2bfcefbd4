"""Opens a shard with the reader of its format.

Reads shards of the MDS format.

Reads shards of lines: JSON, CSV, TSV, XSV. A second file, the "meta", has the offset of each line.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.errors import UnsafeDataError
from lightning_faulttolerant.streaming.format.encoding import Positions
from lightning_faulttolerant.streaming.format.layout import layout_of
from lightning_faulttolerant.streaming.format.shard import DECODING_ERRORS, ShardReader
from lightning_faulttolerant.streaming.format.shard_info import ShardInfo

_DECODERS: dict[str, Callable[[str], object]] = {"str": str, "int": int, "float": float}


class TextReader(ShardReader):
    """Random access to the lines of a shard."""

    def __init__(self, info: ShardInfo, directory: str) -> None:
        super().__init__(info, directory)
        self._newline = info.columns.newline
        header = self._header().encode()
        data, meta = info.files
        self._file = self._map(data)
        try:
            if self._file[: len(header)] != header:
                raise self._damaged(f"it does not begin with {header!r}")
            self._bounds = self._offsets(self._map(meta), first=len(header), end=data.num_bytes)
        except BaseException:
            self.close()
            raise
        self._bound = self._bounds.data

    @abstractmethod
    def _header(self) -> str:
        """Return the text before the first line."""

    @abstractmethod
    def _decoded(self, line: str) -> dict[str, object]:
        """Return the sample of a line. The line is passed without its line end."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._checked_id(index)
        try:
            line = self._file[self._bound[number] : self._bound[number + 1]].decode()
            if not line.endswith(self._newline):
                raise ValueError("its line does not end")
            return self._decoded(line[: -len(self._newline)])
        except DECODING_ERRORS as error:
            raise self._undecodable(number, error) from error

    def samples(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Yield many samples."""
        return map(self.__getitem__, self._checked_ids(ids).tolist())


class JSONReader(TextReader):
    """Random access to the samples of a shard with a JSON object on each line."""

    def _header(self) -> str:
        return ""

    def _decoded(self, line: str) -> dict[str, object]:
        sample = json.loads(line)
        if not isinstance(sample, dict) or not all(name in sample for name in self._info.columns.names):
            raise ValueError(f"its line is not an object with {self._info.columns.names}")
        return sample


class XSVReader(TextReader):
    """Random access to the samples of a shard with separated values on each line."""

    def __init__(self, info: ShardInfo, directory: str) -> None:
        columns = info.columns
        self._columns = [(name, _DECODERS[kind]) for name, kind in zip(columns.names, columns.encodings, strict=True)]
        super().__init__(info, directory)

    def _header(self) -> str:
        return self._info.columns.separator.join(self._info.columns.names) + self._newline

    def _decoded(self, line: str) -> dict[str, object]:
        values = line.split(self._info.columns.separator)
        if len(values) != len(self._columns):
            raise ValueError(f"its line has {len(values)} values for {len(self._columns)} columns")
        return {name: decode(value) for (name, decode), value in zip(self._columns, values, strict=True)}


# Samples decoded per call. Large enough to spread numpy's cost per call over many samples. Small enough that the first
# sample does not wait for the rest of a shard, and that keeping a sample does not keep many others.
_BLOCK_SAMPLES = 256
_BLOCK_BYTES = 1 << 20
# Fewer samples than this are faster one by one.
_FEW = 16


class MDSReader(ShardReader):
    """Random access to the samples of an MDS shard: the number of samples, offsets, a description, the samples."""

    def __init__(self, info: ShardInfo, directory: str) -> None:
        super().__init__(info, directory)
        self._layout = layout_of(info.columns)
        self._windows_by_size: dict[int, npt.NDArray[Any]] = {}
        self._file = self._map(info.files[0])
        try:
            self._bounds = self._offsets(self._file, first=None, end=info.files[0].num_bytes)
            self._check_sizes()
        except BaseException:
            self.close()
            raise
        self._bound = self._bounds.data
        mean_bytes = info.files[0].num_bytes // max(1, info.num_samples)
        self._block = max(1, min(_BLOCK_SAMPLES, _BLOCK_BYTES // max(1, mean_bytes)))

    def _check_sizes(self) -> None:
        sizes = np.diff(self._bounds)
        least = self._layout.min_bytes
        if (sizes < least).any() or (self._layout.is_fixed and (sizes != least).any()):
            raise self._damaged(f"its columns need {least} bytes, but a sample has {sizes.min()} to {sizes.max()}")

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = self._checked_id(index)
        try:
            return self._layout.decode(self._file, self._bound[number], self._bound[number + 1])
        except DECODING_ERRORS as error:
            raise self._undecodable(number, error) from error

    def samples(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Yield many samples, faster than one by one."""
        checked = self._checked_ids(ids)
        for start in range(0, len(checked), self._block):
            block = checked[start : start + self._block]
            if len(block) < _FEW:
                yield from map(self.__getitem__, block.tolist())
            else:
                yield from self._many(block)

    def lent_samples(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[dict[str, object]]:
        """Yield many samples. Their large arrays are views of the file."""
        if not self._layout.is_lent:
            yield from self.samples(ids)
            return
        yield from map(self._lent, self._checked_ids(ids).tolist())

    def _lent(self, number: int) -> dict[str, object]:
        try:
            return self._layout.lend(self._file, self._bound[number], self._bound[number + 1])
        except DECODING_ERRORS as error:
            raise self._undecodable(number, error) from error

    def _many(self, ids: Positions) -> list[dict[str, object]]:
        bounds = self._bounds
        try:
            return self._layout.decode_many(self._file, self._windows, bounds[ids], bounds[ids + 1])
        except DECODING_ERRORS:
            # Decode one by one to name the faulty sample.
            return [self[number] for number in ids.tolist()]

    def _windows(self, size: int) -> npt.NDArray[Any]:
        """Return an array of all runs of ``size`` bytes, indexed by their first byte. They overlap; none is copied."""
        windows = self._windows_by_size.get(size)
        if windows is None:
            num_windows = max(0, len(self._file) - size + 1)
            windows = np.ndarray((num_windows,), dtype=f"V{size}", buffer=self._file, strides=(1,))
            self._windows_by_size[size] = windows
        return windows

    def close(self) -> None:
        """Release the file."""
        self._windows_by_size.clear()
        super().close()


_READERS: dict[str, type[ShardReader]] = {
    "mds": MDSReader,
    "json": JSONReader,
    "csv": XSVReader,
    "tsv": XSVReader,
    "xsv": XSVReader,
}


def open_shard(info: ShardInfo, directory: str, *, allow_unsafe_types: bool = False) -> ShardReader:
    """Open a shard with local, uncompressed files.

    Args:
        info: The shard's index entry.
        directory: The directory of the split.
        allow_unsafe_types: Whether to read pickled columns, too. They run any code that their bytes contain.

    Raises:
        UnsafeDataError: If a column is pickled and that is not allowed; none of its bytes has been read.
        MissingShardError: If a file is missing.
        DamagedShardError: If it doesn't match the index.
    """
    if not allow_unsafe_types:
        check_safe(info)
    return _READERS[info.format](info, directory)


def check_safe(info: ShardInfo) -> None:
    """Raise UnsafeDataError if reading a shard may run code from it."""
    name = layout_of(info.columns).unsafe_column() if info.format == "mds" else None
    if name is not None:
        raise UnsafeDataError(
            f"Column {name!r} of {info.files[0].basename} is pickled: reading it can run any code that the writer of "
            "the shard has put there. If you trust the source, pass allow_unsafe_types=True."
        )
