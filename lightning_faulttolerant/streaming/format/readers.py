"""The readers of shards, one for each format: MDS, and lines of JSON, CSV, TSV, or XSV.

Shards of lines have two files. The second file, the "meta", has the offset of each line.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError, UnsafeDataError
from lightning_faulttolerant.records.lines import parse_json
from lightning_faulttolerant.streaming.format.encoding import Buffer, Positions
from lightning_faulttolerant.streaming.format.index import ShardFile, ShardInfo, layout_of

DECODING_ERRORS = (ValueError, LookupError, OSError, ArithmeticError)
"""Errors that decoders raise for invalid bytes."""

_UINT32_BYTES = 4


class ShardReader(ABC):
    """Random access to the samples of one shard.

    Files are opened once and mapped. Offsets are read and checked once. Returned samples belong to the caller and stay
    valid after ``close``.

    Args:
        info: The shard's index entry.
        directory: The directory of its uncompressed files.
    """

    def __init__(self, info: ShardInfo, directory: str) -> None:
        self._info = info
        self._directory = directory
        self._file: Buffer = b""
        self._is_closed = False

    def __len__(self) -> int:
        return self._info.num_samples

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, object]:
        """Return a sample.

        Args:
            index: The index in the shard, from 0; negative from its end.

        Raises:
            IndexError: If the shard has fewer samples.
            DamagedShardError: If the bytes don't encode a sample.
        """

    @abstractmethod
    def samples(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[dict[str, Any]]:
        """Yield many samples, faster than one by one.

        Args:
            ids: The indices in the shard, from 0.

        Raises:
            IndexError: If one of them is outside the shard.
            DamagedShardError: If the bytes don't encode a sample.
        """

    def lent_samples(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[dict[str, object]]:
        """Yield many samples for a caller that copies their contents immediately, and does not pass them on.

        Large arrays may be read-only views of the file, which keep it mapped.

        Args:
            ids: The indices in the shard, from 0.

        Raises:
            IndexError: If one of them is outside the shard.
            DamagedShardError: If the bytes don't encode a sample.
        """
        return self.samples(ids)

    def close(self) -> None:
        """Release the files. Samples can't be read any more."""
        self._is_closed = True
        # A thread that is reading has a view of the file. The mapping disappears with the last view.
        if isinstance(self._file, mmap.mmap):
            with contextlib.suppress(BufferError):
                self._file.close()

    def _damaged(self, what: str) -> DamagedShardError:
        path = os.path.join(self._directory, self._info.files[0].basename)
        return DamagedShardError(
            f"The shard {path} is damaged: {what}. Its samples would be wrong; delete the file so that it is "
            f"downloaded again, or write the data set again if this is its only copy."
        )

    def _undecodable(self, number: int, error: Exception) -> Exception:
        if self._is_closed:
            return ValueError(f"This reader of {self._info.files[0].basename} is closed.")
        return self._damaged(f"sample {number} can't be decoded ({error})")

    def _checked_id(self, index: int) -> int:
        num_samples = self._info.num_samples
        if not -num_samples <= index < num_samples:
            raise IndexError(f"There is no sample {index}: {self._info.files[0].basename} has {num_samples}.")
        return index % num_samples

    def _checked_ids(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Positions:
        array = np.asarray(ids, dtype=np.int64)
        # As unsigned numbers, negative ones are the largest.
        if (array.view(np.uint64) >= self._info.num_samples).any():
            raise IndexError(
                f"There are no samples {array.min()} to {array.max()}: {self._info.files[0].basename} has "
                f"{self._info.num_samples}."
            )
        return array

    def _map(self, file: ShardFile) -> Buffer:
        path = os.path.join(self._directory, file.basename)
        try:
            with open(path, "rb") as opened:
                num_bytes = os.fstat(opened.fileno()).st_size
                if num_bytes != file.num_bytes:
                    raise self._damaged(f"{file.basename} has {num_bytes} bytes, but the index says {file.num_bytes}")
                return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if num_bytes else b""
        except FileNotFoundError as error:
            raise MissingShardError(
                f"The shard {path} does not exist. If it is on a remote, pass its address as `remote`. If it was "
                "deleted while it was read, raise the limit of the cache."
            ) from error

    def _offsets(self, table: Buffer, *, first: int | None, end: int) -> Positions:
        """Return the offset of each sample and the end of the last one, from a table after the number of samples.

        Args:
            table: The file that holds the number of samples and the offsets.
            first: Where the first sample begins, or ``None`` for anywhere after the table.
            end: Where the last sample ends.
        """
        num_samples = self._info.num_samples
        head_bytes = _UINT32_BYTES * (num_samples + 2)
        if len(table) < head_bytes:
            raise self._damaged(f"{len(table)} bytes do not hold the offsets of {num_samples} samples")
        numbers = np.frombuffer(table, "<u4", num_samples + 2).astype(np.int64)
        offsets = numbers[1:]
        if numbers[0] != num_samples:
            raise self._damaged(f"it says that it has {numbers[0]} samples, but the index says {num_samples}")
        begins_well = offsets[0] >= head_bytes if first is None else offsets[0] == first
        if not begins_well or offsets[-1] != end or (np.diff(offsets) < 0).any():
            raise self._damaged("its offsets do not ascend from the first byte of its samples to the last")
        return offsets


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

    def __getitem__(self, index: int) -> dict[str, object]:
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
        sample = parse_json(line)
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

    def __getitem__(self, index: int) -> dict[str, object]:
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
