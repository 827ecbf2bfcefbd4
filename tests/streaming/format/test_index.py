import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.errors import IndexFileError
from lightning_faulttolerant.streaming.format.index import parse_index
from tests.foreign import mosaic

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
    """Return an entry with one value changed; its path has dots between keys."""
    shard = copy.deepcopy(shard)
    *above, last = path.split(".")
    inner: Any = shard
    for key in above:
        inner = inner[key]
    inner[last] = value
    return shard


def test_all_that_an_entry_says_is_there() -> None:
    """All names, sizes, and hashes are read, columns keep the order of the index, and unknown keys are ignored."""
    mds, xsv = parse_index(text({**SHARD, "mine": 1}, TEXT_SHARD, fingerprint="x").encode(), source="s")
    assert (mds.format, mds.num_samples, mds.compression) == ("mds", 3, "zstd:7")
    assert (mds.files[0].basename, mds.files[0].num_bytes, mds.files[0].hashes) == (
        "a/shard.00000.mds",
        100,
        {"md5": "00"},
    )
    assert [file.basename for file in mds.zip_files] == ["a/shard.00000.mds.zstd"]
    assert (mds.columns.names, mds.columns.sizes) == (("b", "a"), (8, None))
    assert [file.basename for file in xsv.files] == ["s.xsv", "s.xsv.meta"]
    assert (xsv.num_samples, xsv.zip_files) == (0, ())
    assert (xsv.columns.newline, xsv.columns.separator) == ("\r\n", "|")


def test_shards_share_equal_columns_and_keep_different_ones() -> None:
    """Equal columns are one object; shards of one index may have different ones."""
    other = changed(changed(SHARD, "column_names", ["b", "c"]), "raw_data.basename", "x")
    first, second, third = parse_index(text(SHARD, SHARD, other), source="s")
    assert first.columns is second.columns
    assert third.columns.names == ("b", "c")


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        json.dumps({"version": 2}),
        json.dumps({"version": 2, "shards": {}}),
        json.dumps({"version": 1, "shards": []}),
        json.dumps({"version": 2, "shards": [None]}),
        text(SHARD)[:-40],
        "[" * 100_000,
        b"\xff\xfe\xff",
        b"\x00" * 50,
    ],
    ids=range(13),
)
def test_what_is_no_index_is_refused(broken: str | bytes) -> None:
    """An index that is empty, cut, not JSON, or JSON of something else is an error that names its source."""
    with pytest.raises(IndexFileError, match="s3://bucket/index"):
        parse_index(broken, source="s3://bucket/index.json")


@pytest.mark.parametrize("key", sorted({*SHARD} - {"hashes", "size_limit", "zip_data"}))
def test_a_key_that_is_absent_is_named(key: str) -> None:
    """An entry without a key that is needed to read the shard is an error that names shard and key."""
    with pytest.raises(IndexFileError, match=f"shard 1 has no '{key}'"):
        parse_index(text(SHARD, {k: v for k, v in SHARD.items() if k != key}), source="s")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("version", 3),
        ("format", "parquet"),
        ("samples", -1),
        ("samples", 1.5),
        ("samples", True),
        ("samples", None),
        ("compression", "lz4"),
        ("compression", None),
        ("zip_data", None),
        ("raw_data", None),
        ("raw_data", "x"),
        ("raw_data.bytes", -1),
        ("raw_data.bytes", "1"),
        ("raw_data.hashes", ["md5"]),
        ("raw_data.hashes", {"md5": 1}),
        ("column_names", ["a"]),
        ("column_names", ["a", "a"]),
        ("column_names", ["a", 1]),
        ("column_names", [["a"], "b"]),
        ("column_encodings", ["int", "complex64"]),
        ("column_encodings", ["int", "ndarray:complex64"]),
        ("column_encodings", ["int", "ndarray:float32:0"]),
        ("column_encodings", ["int", "ndarray:float32:x"]),
        ("column_encodings", ["int", "pkl:x"]),
        ("column_sizes", [8]),
        ("column_sizes", [7, None]),
        ("column_sizes", [-8, None]),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused(path: str, value: Any) -> None:
    """An entry with values that are of the wrong kind or contradict each other is refused."""
    with pytest.raises(IndexFileError, match="shard 0"):
        parse_index(text(changed(SHARD, path, value)), source="s")


@pytest.mark.parametrize(
    ("path", "value"),
    [("newline", ""), ("separator", ""), ("separator", None), ("column_encodings", ["bytes"]), ("raw_meta", None)],
)
def test_an_entry_of_lines_that_makes_no_sense_is_refused(path: str, value: Any) -> None:
    """The same holds for the formats with lines as samples."""
    with pytest.raises(IndexFileError, match="shard 0"):
        parse_index(text(changed(TEXT_SHARD, path, value)), source="s")


LEAVING = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a/..",
    "a/./x",
    "a//x",
    "a/",
    "/etc/passwd",
    "//host/x",
    "C:x",
    "c:\\x",
    "a\\..\\..\\x",
    "a\x00b",
    "a\nb",
    "\ud800",
    "s3://bucket/x",
    "index.json",
    7,
    None,
]


@pytest.mark.parametrize("key", ["raw_data", "zip_data"])
@pytest.mark.parametrize("basename", LEAVING)
def test_a_name_that_leaves_the_directory_is_refused(basename: Any, key: str) -> None:
    """An index can't make us read or write outside the directory of its data set, or over the index itself."""
    with pytest.raises(IndexFileError, match="shard 0"):
        parse_index(text(changed(SHARD, f"{key}.basename", basename)), source="s")


@given(st.lists(st.sampled_from(["..", ".", "", "a", "b.mds", "...", "\\", "~", "C:"]), max_size=6).map("/".join))
@settings(deadline=None, max_examples=300)
def test_a_name_that_is_accepted_stays_in_the_directory(basename: str) -> None:
    """A name is refused, or, joined to a directory, is below that directory."""
    try:
        (info,) = parse_index(text(changed(SHARD, "raw_data.basename", basename)), source="s")
    except IndexFileError:
        return
    path = (Path("/data/set") / info.files[0].basename).resolve()
    assert path.is_relative_to("/data/set/")
    assert path != Path("/data/set")


@pytest.mark.parametrize("basename", ["shard.00000.mds", "a/b/c.mds", "...", "a..b", "..a/x..", "ü", "a b", "shard:1"])
def test_a_plain_name_is_accepted(basename: str) -> None:
    """Names that only look odd, and names in subfolders, are kept as they are."""
    (info,) = parse_index(text(changed(SHARD, "raw_data.basename", basename)), source="s")
    assert info.files[0].basename == basename


def test_one_name_for_two_different_files_is_refused() -> None:
    """Two shards may be the same file, but two files of one name are refused: one would be read for the other."""
    assert len(parse_index(text(SHARD, SHARD), source="s")) == 2
    with pytest.raises(IndexFileError, match="two different files"):
        parse_index(text(SHARD, changed(SHARD, "raw_data.bytes", 101)), source="s")
    with pytest.raises(IndexFileError, match="two different files"):
        parse_index(text(changed(SHARD, "zip_data.basename", SHARD["raw_data"]["basename"])), source="s")


def test_an_index_of_many_shards_is_read_in_order() -> None:
    """The order of the shards is that of the index, for many as for few."""
    shards = [changed(TEXT_SHARD, "samples", number) for number in range(3000)]
    assert [info.num_samples for info in parse_index(text(*shards), source="s")] == list(range(3000))


def test_an_index_of_the_original_without_samples_is_read(tmp_path: Path) -> None:
    """A data set that nothing was written to has an index without shards."""
    with mosaic().MDSWriter(columns={"i": "int"}, out=str(tmp_path / "out")):
        pass
    assert parse_index((tmp_path / "out" / "index.json").read_bytes(), source="s") == ()
