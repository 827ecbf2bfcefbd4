"""The index of a data set: the files and columns of each shard, and the byte layout of its samples.

The index is not trusted: it may be damaged, or crafted to write files elsewhere. Nothing here opens a shard. The layout
of a set of columns is created once, and shared by all shards that have these columns.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np

from lightning_faulttolerant.errors import DamagedIndexError
from lightning_faulttolerant.streaming.format.codecs import (
    ImageFile,
    ImageList,
    JpegArray,
    RawImage,
    is_known_compression,
)
from lightning_faulttolerant.streaming.format.encoding import (
    DTYPES,
    Buffer,
    Bytes,
    Digits,
    Encoding,
    Int,
    Json,
    Pickled,
    Positions,
    Scalar,
    Str,
    Windows,
    array_encoding,
    extra,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """One file of a shard.

    Args:
        basename: Its path relative to the directory of the split; may have subfolders, never leaves the directory.
        num_bytes: Its size.
        hashes: Hexadecimal digests of the whole file, by the name of the algorithm.
    """

    basename: str
    num_bytes: int
    hashes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard of an index.

    Args:
        format: ``mds``, ``json``, ``csv``, ``tsv`` or ``xsv``.
        num_samples: The number of its samples; may be 0.
        files: The files that are read: the data, followed by the offsets ("meta") for formats other than ``mds``.
        zip_files: The compressed files stored remotely, in the same order; empty if the data set is not compressed.
        compression: The algorithm and its level (``zstd:7``), or ``None``.
        columns: The information to read a sample: names, encodings, sizes, newline, separator.
    """

    format: str
    num_samples: int
    files: tuple[ShardFile, ...]
    zip_files: tuple[ShardFile, ...] = ()
    compression: str | None = None
    columns: Columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The columns of a shard, in the order of the file.

    Args:
        names: The name of each column.
        encodings: ``int``, ``ndarray:float32:3,3``, ``jpeg``, ...
        sizes: Bytes of a fixed-size column, ``None`` for one of variable size (``mds`` only).
        newline: The end of a line (formats other than ``mds``).
        separator: The separator of values (``csv``, ``tsv``, ``xsv``).
    """

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...] = ()
    newline: str = "\n"
    separator: str = ","


_XXHASHES = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
# hashlib's constructors, except those with a digest of variable length.
_HASHLIB = tuple(
    sorted(name for name in hashlib.algorithms_available if hasattr(hashlib, name) and not name.startswith("shake_"))
)
_CHUNK_BYTES = 1 << 20


def is_known_hash(name: object) -> bool:
    """Return whether a hash of this name exists. Those of ``xxhash`` need the package, from the first digest on."""
    return name in _HASHLIB or name in _XXHASHES


def digest(path: str, algorithm: str) -> str:
    """Return the digest of a file, read in parts.

    Args:
        path: The path of the file.
        algorithm: ``sha1``, ``xxh64``, ...

    Raises:
        ValueError: If no hash of this name exists.
        ImportError: If it is one of xxhash's, and xxhash is not installed.
    """
    state = _new(algorithm)
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            state.update(chunk)
    return str(state.hexdigest())


def digest_of(data: bytes, algorithm: str) -> str:
    """Return the digest of bytes, as ``digest`` does for a file."""
    state = _new(algorithm)
    state.update(data)
    return str(state.hexdigest())


def _new(algorithm: str) -> Any:
    if not is_known_hash(algorithm):
        raise ValueError(f"The hash {algorithm!r} is unknown. Use one of {', '.join(_HASHLIB + _XXHASHES)}.")
    if algorithm in _XXHASHES:
        return getattr(extra("xxhash", purpose=f"for the hash {algorithm}"), algorithm)()
    # Not for secrets: a platform that forbids old algorithms for secrets may allow them here.
    return hashlib.new(algorithm, usedforsecurity=False)


_MAKERS: dict[str, Callable[[], Encoding]] = {
    "bytes": Bytes,
    "str": Str,
    "int": Int,
    "ndarray": functools.partial(array_encoding, ""),
    **{dtype: functools.partial(Scalar, dtype) for dtype in DTYPES},
    "str_int": functools.partial(Digits, "str_int", int),
    "str_float": functools.partial(Digits, "str_float", float),
    "str_decimal": functools.partial(Digits, "str_decimal", Decimal),
    "pil": RawImage,
    "jpeg": functools.partial(ImageFile, "JPEG"),
    "png": functools.partial(ImageFile, "PNG"),
    "jpeg_array": JpegArray,
    "jpegarray": JpegArray,
    "list[pil]": lambda: ImageList(RawImage()),
    "list[jpeg]": lambda: ImageList(ImageFile("JPEG")),
    "list[png]": lambda: ImageList(ImageFile("PNG")),
    "pkl": Pickled,
    "json": Json,
}

ENCODINGS = tuple(_MAKERS)
"""Names of all encodings; ``ndarray`` may be followed by ``:<dtype>`` or ``:<dtype>:<shape>``."""


@functools.lru_cache(maxsize=1024)
def encoding_of(name: str) -> Encoding:
    """Return the encoding with the given name.

    Args:
        name: ``int``, ``jpeg``, ``ndarray:float32:3,3``, ...

    Raises:
        ValueError: If no encoding has this name.
    """
    family, _, config = name.partition(":")
    if family == "ndarray" and config:
        return array_encoding(config)
    if name not in _MAKERS:
        raise ValueError(
            f"the encoding {name!r} is unknown; known are {', '.join(ENCODINGS)}, ndarray:<dtype>[:<shape>]"
        )
    return _MAKERS[name]()


INDEX_BASENAME = "index.json"
"""The name of an index, in the directory of its split."""

VERSION = 2
"""Version of the format, the only one that exists."""

SEPARATORS = {"csv": ",", "tsv": "\t"}
"""The separator of values in the line formats with a fixed separator."""

TEXT_ENCODINGS = ("str", "int", "float")
"""Encodings of the columns of formats other than ``mds``."""

FORMATS = ("mds", "json", "csv", "tsv", "xsv")
"""Formats of shards; a file name ends with one of them."""

# A drive, an absolute path, a component that is empty or consists of dots only, a backslash, a control character.
_LEAVES_DIRECTORY = re.compile(r"(?:[A-Za-z]:|/)|(?:^|.*/)\.{0,2}(?:/.*|$)|.*[\\\x00-\x1f\x7f]", re.DOTALL)


def parse_index(text: str | bytes, *, source: str) -> tuple[ShardInfo, ...]:
    """Read the text of an index.

    Args:
        text: The content of the file.
        source: Its origin, for errors.

    Returns:
        The shards in order, which is the order of the samples.

    Raises:
        DamagedIndexError: If it is not an index, is incomplete, or names a file outside the data set's directory.
    """
    return _Parser(source).shards(text)


class _Parser:
    """Reads one index. Equal columns become one object, so readers share what they build from them."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._columns: dict[tuple[object, ...], Columns] = {}
        self._files: dict[str, ShardFile] = {}

    def shards(self, text: str | bytes) -> tuple[ShardInfo, ...]:
        if not text:
            raise self._error("it is empty")
        try:
            index = json.loads(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise self._error(f"it is not JSON: {error}") from error
        if not isinstance(index, dict) or not isinstance(index.get("shards"), list):
            raise self._error("it has no list of shards")
        if index.get("version") != VERSION:
            raise self._error(f"its version is {index.get('version')!r}, but this package reads only version {VERSION}")
        return tuple(self._shard(number, entry) for number, entry in enumerate(index["shards"]))

    def _shard(self, number: int, entry: object) -> ShardInfo:
        try:
            if not isinstance(entry, dict):
                raise ValueError("it is not an object")
            if entry["version"] != VERSION:
                raise ValueError(f"its version is {entry['version']!r}, but this package reads only version {VERSION}")
            return self._info(entry)
        except KeyError as error:
            raise self._error(f"shard {number} has no {error}") from error
        except (ValueError, TypeError) as error:
            raise self._error(f"shard {number}: {error}") from error

    def _info(self, entry: dict[str, Any]) -> ShardInfo:
        format_ = entry["format"]
        if format_ not in FORMATS:
            raise ValueError(f"its format is {format_!r}, but this package reads only {', '.join(FORMATS)}")
        parts = ("data",) if format_ == "mds" else ("data", "meta")
        compression = entry["compression"]
        if compression is not None and not is_known_compression(compression):
            raise ValueError(f"its compression {compression!r} is not known")
        zips = [entry.get(f"zip_{part}") for part in parts]
        if any(bool(file) != bool(compression) for file in zips):
            raise ValueError(f"its compression is {compression!r}, but its compressed files are {zips}")
        return ShardInfo(
            format=format_,
            num_samples=_count(entry["samples"], "samples"),
            files=tuple(self._file(entry[f"raw_{part}"]) for part in parts),
            zip_files=tuple(self._file(file) for file in zips if file),
            compression=compression,
            columns=self._columns_of(entry, format_),
        )

    def _file(self, entry: object) -> ShardFile:
        if not isinstance(entry, dict):
            raise ValueError(f"the entry of a file is {entry!r}")
        hashes = entry.get("hashes") or {}
        if not isinstance(hashes, dict) or not all(isinstance(digest, str) for digest in hashes.values()):
            raise ValueError(f"the hashes of a file are {hashes!r}")
        basename = entry["basename"]
        check_basename(basename)
        file = ShardFile(basename=basename, num_bytes=_count(entry["bytes"], "bytes"), hashes=hashes)
        if self._files.setdefault(basename, file) != file:
            raise ValueError(f"two different files have the name {basename!r}")
        return file

    def _columns_of(self, entry: dict[str, Any], format_: str) -> Columns:
        if format_ == "json":
            columns = entry["columns"]
            if not isinstance(columns, Mapping):
                raise ValueError(f"its columns are {columns!r}")
            names, encodings, sizes = tuple(columns), tuple(columns.values()), ()
        else:
            names, encodings = tuple(entry["column_names"]), tuple(entry["column_encodings"])
            sizes = tuple(entry["column_sizes"]) if format_ == "mds" else ()
        newline = "\n" if format_ == "mds" else entry["newline"]
        separator = entry["separator"] if format_ == "xsv" else SEPARATORS.get(format_, ",")
        key = (format_ == "mds", names, encodings, sizes, newline, separator)
        if key not in self._columns:
            columns = Columns(names=names, encodings=encodings, sizes=sizes, newline=newline, separator=separator)
            _check_columns(columns, is_mds=format_ == "mds")
            self._columns[key] = columns
        return self._columns[key]

    def _error(self, what: str) -> DamagedIndexError:
        return DamagedIndexError(
            f"The index {self._source} can't be read: {what}. Without it, the samples are not known. Write it again, "
            "or copy it again."
        )


def check_basename(basename: object) -> None:
    """Raise ValueError unless a name stays in the directory that it is joined to."""
    if not isinstance(basename, str) or _LEAVES_DIRECTORY.match(basename):
        raise ValueError(f"the file name {basename!r} leads outside the directory of the data set")
    if basename == INDEX_BASENAME:
        raise ValueError("a shard has the name of the index")
    basename.encode()  # a name that no file can have, such as half of a surrogate pair, is a ValueError, too


def _check_columns(columns: Columns, *, is_mds: bool) -> None:
    if not all(isinstance(text, str) for text in (*columns.names, *columns.encodings)):
        raise ValueError(f"names and encodings of its columns are {columns.names} and {columns.encodings}")
    if len(set(columns.names)) != len(columns.names) or len(columns.names) != len(columns.encodings):
        raise ValueError(f"its columns {columns.names} do not match their encodings {columns.encodings}")
    if not all(isinstance(text, str) and text for text in (columns.newline, columns.separator)):
        raise ValueError(f"its lines end with {columns.newline!r} and values with {columns.separator!r}")
    if not is_mds:
        unknown = [encoding for encoding in columns.encodings if encoding not in TEXT_ENCODINGS]
        if unknown:
            raise ValueError(f"the encoding {unknown[0]!r} is unknown; known are {', '.join(TEXT_ENCODINGS)}")
        return
    if len(columns.sizes) != len(columns.names):
        raise ValueError(f"its columns {columns.names} do not match their sizes {columns.sizes}")
    for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True):
        expected = encoding_of(encoding).size
        if size is not None and _count(size, "bytes of a column") and expected is not None and size != expected:
            raise ValueError(f"column {name!r} of encoding {encoding!r} has {size} bytes, but that has {expected}")


def _count(value: object, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"its number of {what} is {value!r}")
    return value


_UINT32_BYTES = 4

# The name of a column, the function that decodes its bytes, and the number of bytes if it is constant.
Decoder: TypeAlias = tuple[str, Callable[[Buffer, int, int], Any], int | None]


@functools.lru_cache(maxsize=1024)
def layout_of(columns: Columns) -> Layout:
    """Return the layout of columns. Equal columns share one."""
    return Layout(columns)


class Layout:
    """Splits samples: the lengths of the columns of variable size, then the payloads of all columns.

    Args:
        columns: The columns as the index lists them.
    """

    def __init__(self, columns: Columns) -> None:
        # A size of 0 means the same as none: the length is in each sample.
        self._columns: tuple[tuple[str, Encoding, int | None], ...] = tuple(
            (name, encoding_of(encoding), size or None)
            for name, encoding, size in zip(columns.names, columns.encodings, columns.sizes, strict=True)
        )
        self.names = columns.names
        self._decoders = tuple((name, encoding.decode, size) for name, encoding, size in self._columns)
        self._lenders = tuple((name, encoding.lend, size) for name, encoding, size in self._columns)
        self.is_lent = any(encoding.is_lent for _, encoding, _ in self._columns)
        """Whether ``lend`` avoids copies that ``decode`` makes."""
        self._num_lengths = sum(size is None for _, _, size in self._columns)
        self._head = struct.Struct(f"<{self._num_lengths}I")
        self.min_bytes = self._head.size + sum(size or 0 for _, _, size in self._columns)
        """The smallest size of a sample: lengths, and everything of fixed size."""

    @property
    def is_fixed(self) -> bool:
        """Whether all samples have exactly ``min_bytes``."""
        return not self._num_lengths

    def unsafe_column(self) -> str | None:
        """Return the name of a column that is not safe to decode, if one exists."""
        return next((name for name, encoding, _ in self._columns if not encoding.is_safe), None)

    def decode(self, buffer: Buffer, begin: int, end: int) -> dict[str, object]:
        """Return the sample in ``buffer[begin:end]``, which has at least ``min_bytes``.

        Raises:
            ValueError: If the bytes don't encode a sample.
        """
        return self._taken_apart(buffer, begin, end, self._decoders)

    def lend(self, buffer: Buffer, begin: int, end: int) -> dict[str, object]:
        """Return the sample in ``buffer[begin:end]`` with arrays that may be views of the buffer.

        Raises:
            ValueError: If the bytes don't encode a sample.
        """
        return self._taken_apart(buffer, begin, end, self._lenders)

    def _taken_apart(self, buffer: Buffer, begin: int, end: int, decoders: tuple[Decoder, ...]) -> dict[str, object]:
        lengths = iter(self._head.unpack_from(buffer, begin))
        at = begin + self._head.size
        sample = {}
        for name, decode, size in decoders:
            first, at = at, at + (size or next(lengths))
            if at > end:
                raise ValueError(f"column {name!r} ends at byte {at}, the sample at {end}")
            sample[name] = decode(buffer, first, at)
        if at != end:
            raise ValueError(f"the columns end at byte {at}, the sample at {end}")
        return sample

    def decode_many(self, buffer: Buffer, windows: Windows, begins: Positions, ends: Positions) -> list[dict[str, Any]]:
        """Return many samples in one call: the same as calling ``decode`` for each.

        Raises:
            ValueError: If the bytes of any of them don't encode a sample.
        """
        spans = self._spans(windows, begins, ends)
        values = [
            encoding.decode_many(buffer, windows, first, last)
            for (_, encoding, _), (first, last) in zip(self._columns, spans, strict=True)
        ]
        names = self.names
        return (
            [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)] if names else [{} for _ in begins]
        )

    def _spans(self, windows: Windows, begins: Positions, ends: Positions) -> list[tuple[Positions, Positions]]:
        """Return the span of each column in each sample."""
        at = begins + self._head.size
        lengths = self._lengths(windows, begins)
        spans = []
        for _, _, size in self._columns:
            first, at = at, at + (size or next(lengths))
            spans.append((first, at))
        if not self.is_fixed and (at != ends).any():
            raise ValueError("the columns do not end where the sample ends")
        return spans

    def _lengths(self, windows: Windows, begins: Positions) -> Iterator[Positions]:
        if self.is_fixed:
            return iter(())
        table = windows(self._head.size)[begins].view("<u4").reshape(-1, self._num_lengths)
        return iter(table.T.astype(np.int64))
