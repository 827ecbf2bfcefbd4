"""Reads the index of a data set without trusting it: it may be damaged, or crafted to write files elsewhere.

All encodings of MDS columns, by name.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from lightning_faulttolerant.errors import DamagedIndexError
from lightning_faulttolerant.streaming.format.arrays import DTYPES, array_encoding
from lightning_faulttolerant.streaming.format.compression import is_known_compression
from lightning_faulttolerant.streaming.format.encoding import Encoding
from lightning_faulttolerant.streaming.format.images import ImageFile, ImageList, JpegArray, RawImage
from lightning_faulttolerant.streaming.format.plain import Bytes, Digits, Int, Json, Pickled, Scalar, Str
from lightning_faulttolerant.streaming.format.shard_info import Columns, ShardFile, ShardInfo

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
        except (ValueError, RecursionError) as error:
            raise self._error(f"it is not JSON: {error}") from error
        if not isinstance(index, dict) or not isinstance(index.get("shards"), list):
            raise self._error("it has no list of shards")
        if index.get("version") != VERSION:
            raise self._error(f"its version is {index.get('version')!r}, the one that is known is {VERSION}")
        return tuple(self._shard(number, entry) for number, entry in enumerate(index["shards"]))

    def _shard(self, number: int, entry: object) -> ShardInfo:
        try:
            if not isinstance(entry, dict):
                raise ValueError("it is not an object")
            if entry["version"] != VERSION:
                raise ValueError(f"its version is {entry['version']!r}, the one that is known is {VERSION}")
            return self._info(entry)
        except KeyError as error:
            raise self._error(f"shard {number} has no {error}") from error
        except (ValueError, TypeError) as error:
            raise self._error(f"shard {number}: {error}") from error

    def _info(self, entry: dict[str, Any]) -> ShardInfo:
        format_ = entry["format"]
        if format_ not in FORMATS:
            raise ValueError(f"its format is {format_!r}, those known are {', '.join(FORMATS)}")
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
        raise ValueError(f"the name {basename!r} of a file does not stay in the directory of the data set")
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
