"""Writers of data sets, in MDS or in lines of JSON, CSV, TSV, or XSV: they cut samples into shards.

The index is written last.
"""

from __future__ import annotations

import contextlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np

from lightning_faulttolerant.storage.store import parse_bytes
from lightning_faulttolerant.streaming.format.codecs import compress, extension, is_known_compression
from lightning_faulttolerant.streaming.format.encoding import WrongTypeError, expect_type
from lightning_faulttolerant.streaming.format.index import (
    SEPARATORS,
    TEXT_ENCODINGS,
    VERSION,
    digest_of,
    encoding_of,
    is_known_hash,
)
from lightning_faulttolerant.streaming.format.output import Output

_Writer = TypeVar("_Writer", bound="DatasetWriter")

_MAX_SHARD_BYTES = 2**32


class DatasetWriter(ABC):
    """Writes a data set shard by shard.

    Use it in a ``with`` block. The index is written last: a data set that has an index is complete. If the block
    raises, or the process is killed, no index is written.

    Args:
        out: A directory, a remote address (``s3://...``, anything fsspec knows), or a pair of both.
        keep_local: Keep the local files of a data set that is also uploaded.
        compression: ``br``, ``bz2``, ``gz``, ``snappy``, ``zstd``, each except snappy optionally with a level:
            ``zstd:7``.
        hashes: The algorithms of the digests in the index, sorted by name.
        size_limit: Maximum bytes of a shard; also a string such as ``"100kb"``. A larger sample gets a separate shard.
            ``None``: one shard.
        progress_bar: Show how many files have been uploaded.
        max_workers: The number of threads that upload.
        retry: How many times a failed upload is tried again.
        exist_ok: Replace an existing data set: its index and shards are deleted, nothing else.
        storage_options: Options for the file system of the remote address.

    Raises:
        ValueError: If an argument is not one of those above.
        FileExistsError: If the directory is not empty and ``exist_ok`` is off.
    """

    format: str
    _bytes_per_sample = 0

    def __init__(
        self,
        *,
        out: str | os.PathLike[str] | tuple[str, str],
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = 1 << 26,
        progress_bar: bool = False,
        max_workers: int | None = None,
        retry: int = 2,
        exist_ok: bool = False,
        storage_options: Mapping[str, object] | None = None,
    ) -> None:
        self.compression = compression or None
        if self.compression is not None and not is_known_compression(self.compression):
            raise ValueError(f"The compression {compression!r} is unknown.")
        self.hashes = list(hashes or [])
        if self.hashes != sorted(set(self.hashes)):
            raise ValueError(f"Hashes must be sorted, each once: {self.hashes}")
        unknown = [name for name in self.hashes if not is_known_hash(name)]
        if unknown:
            raise ValueError(f"The hash {unknown[0]!r} is unknown.")
        self.size_limit = _num_bytes(size_limit)
        self._shards: list[dict[str, object]] = []
        self._samples: list[bytes] = []
        self._finished = False
        self._shard_bytes = self._empty_bytes()
        self._output = Output(
            out,
            keep_local=keep_local,
            progress_bar=progress_bar,
            max_workers=max_workers,
            retry=retry,
            exist_ok=exist_ok,
            storage_options=storage_options,
        )

    @abstractmethod
    def encode_sample(self, sample: Mapping[str, object]) -> bytes:
        """Return the bytes of a sample."""

    @abstractmethod
    def _encoded_shard(self, samples: list[bytes]) -> dict[str, bytes]:
        """Return the files of a shard: ``data``, and ``meta`` if the format has it."""

    def _empty_bytes(self) -> int:
        """Return the number of bytes in a shard before its first sample."""
        return 0

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index."""
        return {
            "version": VERSION,
            "format": self.format,
            "compression": self.compression,
            "hashes": self.hashes,
            "size_limit": self.size_limit,
        }

    def write(self, sample: Mapping[str, object]) -> None:
        """Write a sample.

        Args:
            sample: A value for each column; values without a column are not written.

        Raises:
            TypeError: If a value is not of its column's type.
            ValueError: If a value can't be stored unchanged.
            KeyError: If a column has no value.
            OSError: If a shard can't be written or uploaded.
        """
        if self._finished:
            raise ValueError("This writer has finished, so no sample can be added.")
        data = self.encode_sample(sample)
        num_bytes = len(data) + self._bytes_per_sample
        if self.size_limit and self.size_limit < self._shard_bytes + num_bytes:
            self._flush()
        self._samples.append(data)
        self._shard_bytes += num_bytes

    def finish(self) -> None:
        """Write the remaining samples and the index. Wait until all files are in place."""
        if self._finished:
            return
        self._finished = True
        try:
            if self._samples:
                self._flush()
            text = json.dumps({"version": VERSION, "shards": self._shards}, sort_keys=True)
            self._output.publish(text.encode())
        except BaseException:
            self._output.abandon()
            raise

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is None:
            self.finish()
        else:
            self._finished = True
            self._output.abandon()

    def _flush(self) -> None:
        files = self._encoded_shard(self._samples)
        entry: dict[str, object] = {"samples": len(self._samples)}
        for part, data in files.items():
            entry[f"raw_{part}"], entry[f"zip_{part}"] = self._stored(part, data)
        entry.update(self.get_config())
        self._shards.append(entry)
        self._samples = []
        self._shard_bytes = self._empty_bytes()

    def _stored(self, part: str, data: bytes) -> tuple[dict[str, object], dict[str, object] | None]:
        names = ["shard", f"{len(self._shards):05}", self.format, *(["meta"] if part == "meta" else [])]
        basename = ".".join(names)
        raw = self._described(basename, data)
        if self.compression is None:
            self._output.add(basename, data)
            return raw, None
        zipped = compress(data, self.compression)
        basename = f"{basename}.{extension(self.compression)}"
        self._output.add(basename, zipped)
        return raw, self._described(basename, zipped)

    def _described(self, basename: str, data: bytes) -> dict[str, object]:
        hashes = {name: digest_of(data, name) for name in self.hashes}
        return {"basename": basename, "bytes": len(data), "hashes": hashes}


def table_of_offsets(samples: list[bytes], *, first: int) -> bytes:
    """Return the number of samples, the offset of each, and the end of the last, as the files store them.

    Args:
        samples: Their bytes.
        first: Where the first one begins.

    Raises:
        ValueError: If they end beyond the range of 32 bits.
    """
    offsets = np.cumsum([first, *map(len, samples)], dtype=np.int64)
    if offsets[-1] >= _MAX_SHARD_BYTES:
        raise ValueError(
            f"A shard would have {offsets[-1]} bytes, but its offsets have 32 bits. Pass a size_limit below 4 GiB."
        )
    table: bytes = np.array([len(samples), *offsets], "<u4").tobytes()
    return table


@contextlib.contextmanager
def _column(name: str, value: object) -> Iterator[None]:
    """Let errors of the block name the column, and be of the kinds that ``write`` promises."""
    try:
        yield
    except ImportError:
        raise
    except TypeError as error:
        raise WrongTypeError(f"Column {name!r}: {error}") from error
    except Exception as error:
        raise ValueError(f"Column {name!r} can't hold {type(value).__name__} {value!r:.100}: {error}") from error


def _num_bytes(size_limit: int | str | None) -> int | None:
    """Return a limit in bytes; ``None`` and 0 mean no limit."""
    if not size_limit:
        return None
    try:
        size_limit = parse_bytes(size_limit)
    except ValueError as error:
        raise ValueError(f"size_limit={size_limit!r}: {error}") from None
    if size_limit >= _MAX_SHARD_BYTES:
        raise ValueError(f"size_limit={size_limit}: it must be from 1 to 2**32 - 1, because offsets have 32 bits.")
    return size_limit


_UINT32_BYTES = 4


class MDSWriter(DatasetWriter):
    """Writes a data set of MDS shards.

    Args:
        columns: The encoding of each column, by its name.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.

    Example:
        >>> import tempfile
        >>> directory = tempfile.mkdtemp()
        >>> with MDSWriter(columns={"x": "ndarray:float32:3", "y": "int"}, out=directory) as writer:
        ...     writer.write({"x": np.zeros(3, np.float32), "y": 1})
    """

    format = "mds"
    _bytes_per_sample = _UINT32_BYTES

    def __init__(self, *, columns: Mapping[str, str], **options: Any) -> None:
        self.columns = dict(columns)
        self.column_names = sorted(columns)
        self.column_encodings = [columns[name] for name in self.column_names]
        try:
            self._encodings = [encoding_of(encoding) for encoding in self.column_encodings]
        except ValueError as error:
            raise TypeError(f"MDSWriter can't write columns {self.columns}: {error}") from error
        self.column_sizes = [encoding.size for encoding in self._encodings]
        super().__init__(**options)

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index and in its file."""
        return {
            **super().get_config(),
            "column_names": self.column_names,
            "column_encodings": self.column_encodings,
            "column_sizes": self.column_sizes,
        }

    def _empty_bytes(self) -> int:
        return 2 * _UINT32_BYTES + len(self._config_text())

    def _config_text(self) -> bytes:
        return json.dumps(self.get_config(), sort_keys=True).encode()

    def encode_sample(self, sample: Mapping[str, object]) -> bytes:
        """Return the bytes of a sample: lengths of the columns of variable size, then all payloads."""
        lengths, payloads = [], []
        for name, encoding in zip(self.column_names, self._encodings, strict=True):
            value = sample[name]
            with _column(name, value):
                # Bytes are stored unchanged in any column: images then need not be encoded again.
                if isinstance(value, bytes):
                    encoding.check(value)
                payload = value if isinstance(value, bytes) else encoding.encode(value)
            if encoding.size is None:
                lengths.append(len(payload))
            payloads.append(payload)
        return np.array(lengths, "<u4").tobytes() + b"".join(payloads)

    def _encoded_shard(self, samples: list[bytes]) -> dict[str, bytes]:
        config = self._config_text()
        first = _UINT32_BYTES * (len(samples) + 2) + len(config)
        return {"data": b"".join([table_of_offsets(samples, first=first), config, *samples])}


_TYPES: dict[str, type] = {"str": str, "int": int, "float": float}


class TextWriter(DatasetWriter):
    r"""Writes a data set with shards of lines.

    Args:
        columns: ``str``, ``int``, or ``float`` for each column, by its name.
        newline: The end of a line.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.
    """

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        unknown = [encoding for encoding in columns.values() if encoding not in TEXT_ENCODINGS]
        if unknown:
            raise TypeError(f"The encoding {unknown[0]!r} is unknown here. Use one of {', '.join(TEXT_ENCODINGS)}.")
        if not newline:
            raise ValueError("newline='' must not be empty: it separates the samples.")
        self.columns = dict(columns)
        self.newline = newline
        super().__init__(**options)

    @abstractmethod
    def _line(self, sample: Mapping[str, object]) -> str:
        """Return the line of a sample without its line end."""

    def _header(self) -> str:
        """Return the text before the first line."""
        return ""

    def encode_sample(self, sample: Mapping[str, object]) -> bytes:
        """Return the line of a sample."""
        for name, encoding in self.columns.items():
            with _column(name, sample[name]):
                expect_type(sample[name], _TYPES[encoding], encoding=encoding)
        return (self._line(sample) + self.newline).encode()

    def _encoded_shard(self, samples: list[bytes]) -> dict[str, bytes]:
        header = self._header().encode()
        config = json.dumps(self.get_config(), sort_keys=True).encode()
        meta = table_of_offsets(samples, first=len(header)) + config
        return {"data": b"".join([header, *samples]), "meta": meta}


class JSONWriter(TextWriter):
    """Writes a data set with a JSON object on each line of its shards."""

    format = "json"

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index and in its meta file."""
        return {**super().get_config(), "columns": self.columns, "newline": self.newline}

    def _line(self, sample: Mapping[str, object]) -> str:
        return json.dumps({name: sample[name] for name in self.columns}, sort_keys=True)


class XSVWriter(TextWriter):
    r"""Writes a data set with separated values on each line of its shards, and the columns on the first line.

    Nothing is quoted: a value that contains the separator or the newline is refused.

    Args:
        columns: ``str``, ``int``, or ``float`` for each column, by its name.
        separator: The separator of values.
        newline: The end of a line.
        **options: Options of ``DatasetWriter``.

    Raises:
        TypeError: If an encoding doesn't exist.
        ValueError: If the name of a column contains the separator or the newline.
    """

    format = "xsv"

    def __init__(self, *, columns: Mapping[str, str], separator: str, newline: str = "\n", **options: Any) -> None:
        if not separator or not newline:
            raise ValueError(f"separator={separator!r} and newline={newline!r} must not be empty.")
        self.separator = separator
        self.column_names = sorted(columns)
        self.column_encodings = [columns[name] for name in self.column_names]
        for name in self.column_names:
            self._check_plain(name, newline)
        super().__init__(columns=columns, newline=newline, **options)

    def get_config(self) -> dict[str, object]:
        """Return the description of each shard in the index and in its meta file."""
        config = {
            **super().get_config(),
            "column_names": self.column_names,
            "column_encodings": self.column_encodings,
            "newline": self.newline,
        }
        return config if self.format in SEPARATORS else {**config, "separator": self.separator}

    def _header(self) -> str:
        return self.separator.join(self.column_names) + self.newline

    def _line(self, sample: Mapping[str, object]) -> str:
        values = [str(_TYPES[self.columns[name]](sample[name])) for name in self.column_names]
        for value in values:
            self._check_plain(value, self.newline)
        return self.separator.join(values)

    def _check_plain(self, text: str, newline: str) -> None:
        if self.separator in text or newline in text:
            raise ValueError(f"{text!r:.200} holds the separator {self.separator!r} or the newline {newline!r}.")


class CSVWriter(XSVWriter):
    r"""Writes a data set of comma-separated values: ``XSVWriter`` with ``separator=","``."""

    format = "csv"

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        super().__init__(columns=columns, separator=SEPARATORS["csv"], newline=newline, **options)


class TSVWriter(XSVWriter):
    r"""Writes a data set of tab-separated values: ``XSVWriter`` with ``separator="\t"``."""

    format = "tsv"

    def __init__(self, *, columns: Mapping[str, str], newline: str = "\n", **options: Any) -> None:
        super().__init__(columns=columns, separator=SEPARATORS["tsv"], newline=newline, **options)
