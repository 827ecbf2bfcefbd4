"""An index is read as it is, or refused by its source, shard, and key; no name in it leaves its directory."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming.format.index import parse_index
from tests.messages import error_of

SHARD = {
    "version": 2,
    "format": "mds",
    "samples": 3,
    "compression": "zstd:7",
    "hashes": ["md5"],
    "size_limit": "100kb",
    "raw_data": {"basename": "a/shard.00000.mds", "bytes": 100, "hashes": {"md5": "00"}},
    "zip_data": {"basename": "a/shard.00000.mds.zstd", "bytes": 50, "hashes": {"md5": "11"}},
    "column_names": ["b", "a"],
    "column_encodings": ["int", "ndarray:float32"],
    "column_sizes": [8, None],
}
TEXT_SHARD = {
    "version": 2,
    "format": "xsv",
    "samples": 0,
    "compression": None,
    "hashes": [],
    "size_limit": None,
    "raw_data": {"basename": "s.xsv", "bytes": 1, "hashes": {}},
    "raw_meta": {"basename": "s.xsv.meta", "bytes": 2, "hashes": {}},
    "zip_data": None,
    "zip_meta": None,
    "column_names": ["a"],
    "column_encodings": ["float"],
    "newline": "\r\n",
    "separator": "|",
}


def text(*shards: Any, **top: Any) -> str:
    """Return an index of some entries."""
    return json.dumps({"version": 2, "shards": shards, **top})


def changed(shard: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return an entry with one value changed, or without a key; its path has dots between keys."""
    shard = copy.deepcopy(shard)
    *above, last = path.split(".")
    inner: Any = shard
    for key in above:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return shard


def test_all_that_an_entry_says_is_there() -> None:
    """All names, sizes, and hashes are read, columns keep the order of the index, and unknown keys are ignored."""
    shards = [{**SHARD, "mine": 1}, TEXT_SHARD, *(changed(TEXT_SHARD, "samples", number) for number in range(2000))]
    mds, xsv, *many = parse_index(text(*shards, fingerprint="x").encode(), source="s")
    assert (mds.format, mds.num_samples, mds.compression) == ("mds", 3, "zstd:7")
    (file,) = mds.files
    assert (file.basename, file.num_bytes, file.hashes) == ("a/shard.00000.mds", 100, {"md5": "00"})
    assert [file.basename for file in mds.zip_files] == ["a/shard.00000.mds.zstd"]
    assert (mds.columns.names, mds.columns.sizes) == (("b", "a"), (8, None))
    assert [file.basename for file in xsv.files] == ["s.xsv", "s.xsv.meta"]
    assert (xsv.num_samples, xsv.zip_files) == (0, ())
    assert (xsv.columns.newline, xsv.columns.separator) == ("\r\n", "|")
    assert [info.num_samples for info in many] == list(range(2000))
    assert many[0].columns is many[1].columns


BROKEN = {
    "empty": "",
    "no version": "{}",
    "no shards": json.dumps({"version": 2}),
    "another version": json.dumps({"version": 1, "shards": []}),
    "cut": text(SHARD)[:-40],
    "deep": "[" * 100_000,
    "no text": b"\xff\xfe\xff",
    "two files of one name": text(SHARD, changed(SHARD, "raw_data.bytes", 101)),
    "one file in two places": text(changed(SHARD, "zip_data.basename", "a/shard.00000.mds")),
}


ENTRIES: dict[str, list[Any]] = {
    "version": [..., 3],
    "format": [..., "parquet"],
    "samples": [..., -1, 1.5, True, None],
    "compression": [..., "lz4", None],
    "zip_data": [None],
    "raw_data": [..., None, "x"],
    "raw_data.bytes": [-1, "1"],
    "raw_data.hashes": [["md5"], {"md5": 1}],
    "column_names": [..., ["a"], ["a", "a"], ["a", 1], [["a"], "b"]],
    "column_encodings": [
        ...,
        *(["int", name] for name in ("complex64", "ndarray:complex64", "ndarray:float32:0", "ndarray:float32:x")),
        ["int", "pkl:x"],
    ],
    "column_sizes": [..., [8], [7, None], [-8, None]],
    "text newline": [""],
    "text separator": ["", None],
    "text column_encodings": [["bytes"]],
    "text raw_meta": [None],
}


def test_what_is_no_index_is_refused(snapshot: SnapshotAssertion) -> None:
    """What is no index, and a key that is absent, of the wrong kind, or contradictory, is refused by its name."""
    indexes: dict[str, Any] = dict(BROKEN)
    for path, values in ENTRIES.items():
        shard = TEXT_SHARD if path.startswith("text ") else SHARD
        for value in values:
            changed_to = text(TEXT_SHARD, changed(shard, path.removeprefix("text "), value))
            indexes[f"{path}: {'absent' if value is ... else value}"] = changed_to
    errors = {
        case: error_of(IndexFileError, lambda index=index: parse_index(index, source="s3://bucket/index.json"))
        for case, index in indexes.items()
    }
    assert errors == snapshot


REFUSED_NAMES = [
    *("", ".", "../x", "a/../../x", "a/", "a//x", "/etc/passwd", "index.json"),
    *("C:x", "a\\..\\..\\x", "a\x00b", "\ud800", "s3://bucket/x", None),
]


def test_a_name_that_leaves_the_directory_is_refused() -> None:
    """An index can't make us read or write outside its directory, but names that only look odd are kept."""
    for key, basename in itertools.product(("raw_data", "zip_data"), REFUSED_NAMES):
        with pytest.raises(IndexFileError, match="shard 0"):
            parse_index(text(changed(SHARD, f"{key}.basename", basename)), source="s")
    for basename in ("a/b/c", "...", "a..b", "..a/x..", "ü", "shard:1"):
        parse_index(text(changed(SHARD, "raw_data.basename", basename)), source="s")
    assert len(parse_index(text(SHARD, SHARD), source="s")) == 2  # two shards may be one file
