"""Reads shards of lines: JSON, CSV, TSV, XSV. A second file, the "meta", has the offset of each line."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_faulttolerant.streaming.format.info import ShardInfo
from lightning_faulttolerant.streaming.format.shard import DECODING_ERRORS, ShardReader

_DECODERS: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}


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
    def _decoded(self, line: str) -> dict[str, Any]:
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

    def _decoded(self, line: str) -> dict[str, Any]:
        sample = json.loads(line)
        if not isinstance(sample, dict) or not all(name in sample for name in self._info.columns.names):
            raise ValueError(f"its line is no object with {self._info.columns.names}")
        return sample


class XSVReader(TextReader):
    """Random access to the samples of a shard with separated values on each line."""

    def __init__(self, info: ShardInfo, directory: str) -> None:
        columns = info.columns
        self._columns = [(name, _DECODERS[kind]) for name, kind in zip(columns.names, columns.encodings, strict=True)]
        super().__init__(info, directory)

    def _header(self) -> str:
        return self._info.columns.separator.join(self._info.columns.names) + self._newline

    def _decoded(self, line: str) -> dict[str, Any]:
        values = line.split(self._info.columns.separator)
        if len(values) != len(self._columns):
            raise ValueError(f"its line has {len(values)} values for {len(self._columns)} columns")
        return {name: decode(value) for (name, decode), value in zip(self._columns, values, strict=True)}
