"""The base class of all shard readers."""

from __future__ import annotations

import contextlib
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.errors import DamagedShardError, MissingShardError
from lightning_faulttolerant.streaming.format.encoding import Buffer, Positions
from lightning_faulttolerant.streaming.format.shard_info import ShardFile, ShardInfo

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
    def __getitem__(self, index: int) -> dict[str, Any]:
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
            raise IndexError(f"Sample {index} of a shard that has {num_samples}: {self._info.files[0].basename}")
        return index % num_samples

    def _checked_ids(self, ids: Sequence[int] | npt.NDArray[np.int64]) -> Positions:
        array = np.asarray(ids, dtype=np.int64)
        # As unsigned numbers, negative ones are the largest.
        if (array.view(np.uint64) >= self._info.num_samples).any():
            raise IndexError(
                f"Samples {array.min()} to {array.max()} of a shard that has {self._info.num_samples}: "
                f"{self._info.files[0].basename}"
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
