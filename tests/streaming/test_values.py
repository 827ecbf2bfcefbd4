"""Values become the original's bytes and come back; what would change, or can't be read, is refused where it is."""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import os
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from PIL import Image
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import default_collate

from lightning_faulttolerant.errors import DamagedShardError, UnsafeDataError
from lightning_faulttolerant.streaming.format.codecs import (
    COMPRESSIONS,
    compress,
    decompress_file,
    extension,
    is_known_compression,
)
from lightning_faulttolerant.streaming.format.index import ENCODINGS, digest, digest_of, encoding_of, is_known_hash
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.foreign import mosaic
from tests.messages import error_of
from tests.streaming.shards import opened, read, same, write

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
SHAPES = ((1,), (3,), (255,), (256,), (2, 3), (1, 300, 2), (1,) * 12)


def image(mode: str = "RGB", size: tuple[int, int] = (5, 7)) -> Image.Image:
    """Return a picture with different pixels."""
    return Image.fromarray(array("uint8", (size[1], size[0], 4))).convert(mode)


def jpeg_bytes(size: tuple[int, int] = (5, 7)) -> bytes:
    """Return a picture as a file."""
    image(size=size).save(file := io.BytesIO(), format="JPEG")
    return file.getvalue()


def array(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array with different values."""
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


VALUES: dict[str, list[Any]] = {
    "bytes": [b"", b"\x00\xff" * 9],
    "str": ["", "grün 猫 \x00"],
    "int": [0, -1, 2**63 - 1, -(2**63)],
    **{dtype: [np.dtype(dtype).type(value) for value in (0, 1, 100)] for dtype in DTYPES},
    "str_int": [0, -(10**30)],
    "str_float": [0.1, float("inf"), -1e-300],
    "str_decimal": [Decimal("0.10"), Decimal("-1E+400")],
    "json": [{"b": [1, None, "ü"], "a": 1.5}, [], "x", 7],
    "ndarray": [array(dtype, shape) for dtype in DTYPES for shape in SHAPES],
    **{f"ndarray:{dtype}": [array(dtype, shape) for shape in (*SHAPES, (70_000,))] for dtype in DTYPES},
    **{
        f"ndarray:{d}:{','.join(map(str, shape))}": [array(d, shape)]
        for d, shape in itertools.product(("uint8", "int32", "float16", "float64"), SHAPES)
    },
    "pil": [image(mode) for mode in ("RGB", "L", "RGBA", "1")],
    "png": [image(mode) for mode in ("RGB", "L", "RGBA")],
    "list[pil]": [[image()] * n for n in (0, 1, 3)],
    "list[png]": [[image(size=(n, 2)) for n in range(1, 4)]],
    "pkl": [{"a": {1, 2}}],
}
LOSSY: dict[str, Any] = {
    "jpeg": image(),
    "list[jpeg]": [image()] * 2,
    "jpegarray": [jpeg_bytes()] * 2,
    "jpeg_array": [jpeg_bytes()] * 2,
}


@pytest.mark.parametrize("name", [*VALUES, *LOSSY])
def test_bytes_are_those_of_the_original_and_values_come_back(name: str) -> None:
    """Each value has the same bytes as in the original, and is decoded from them, alone and among others."""
    original = mosaic("streaming.base.format.mds.encodings")
    encoding = encoding_of(name)
    assert encoding.size == original.get_mds_encoded_size(name)
    for value in VALUES.get(name) or [LOSSY[name]]:
        data = encoding.encode(value)
        assert data == original.mds_encode(name, value)
        assert encoding.size in (None, len(data))
        expected = value if name in VALUES else original.mds_decode(name, data)
        assert same(encoding.decode(data, 0, len(data)), expected)
        assert same(encoding.decode(b"123" + data + b"4", 3, 3 + len(data)), expected)


def test_the_names_are_those_of_the_original() -> None:
    """Every encoding, compression, level, extension, and hash of the original is known, and no other."""
    original, hashes = mosaic("streaming.base.compression"), mosaic("streaming.base.hashing").get_hashes()
    assert set(ENCODINGS) == mosaic("streaming.base.format.mds.encodings").get_mds_encodings()
    assert set(COMPRESSIONS) == original.get_compressions()
    assert all(extension(name) == original.get_compression_extension(name) for name in COMPRESSIONS)
    assert not any(map(is_known_compression, ("lz4", "zstd:0", "zstd:23", "br:12", "snappy:1", "gz:", "", None)))
    others = {"shake_128", "crc32", "", *hashlib.algorithms_available, None} - hashes
    assert len(hashes) > 15
    assert not any(map(is_known_hash, others))


def test_digests_are_those_of_the_original(tmp_path: Path) -> None:
    """The digests of bytes and of a file read in parts are the original's, for each of its algorithms."""
    hashing, data = mosaic("streaming.base.hashing"), bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    for name in hashing.get_hashes():
        assert is_known_hash(name)
        assert digest_of(data, name) == digest(str(tmp_path / "file"), name) == hashing.get_hash(name, data)


def test_a_jpeg_that_was_opened_from_a_file_is_stored_as_that_file(tmp_path: Path) -> None:
    """No second encoding loses anything; a picture resized in place, or without its file, is encoded as it is."""
    path = tmp_path / "x.jpg"
    path.write_bytes(jpeg_bytes((64, 64)))
    encode = encoding_of("jpeg").encode
    with Image.open(path) as opened_image:
        assert encode(opened_image) == path.read_bytes()
        opened_image.thumbnail((16, 16))
        assert Image.open(io.BytesIO(encode(opened_image))).size == (16, 16)
    with Image.open(path) as opened_image:
        opened_image.load()
        path.unlink()
        assert Image.open(io.BytesIO(encode(opened_image))).size == (64, 64)


@given(name=st.sampled_from(sorted(set(ENCODINGS) - {"bytes", "str", "json", "pkl"})), data=st.binary(max_size=40))
def test_bytes_of_anything_else_are_refused(name: str, data: bytes) -> None:
    """Bytes that do not encode a value are a ValueError or the like, or happen to encode another one."""
    with contextlib.suppress(ValueError, LookupError, OSError, ArithmeticError):
        encoding_of(name).decode(data, 0, len(data))


def test_a_value_does_not_take_bytes_after_it() -> None:
    """A shape that needs more bytes than the value has is an error, though the file continues."""
    data = encoding_of("ndarray:int32").encode(array("int32", (2, 3)))
    picture = np.array([5000, 6000, 3], "<u4").tobytes() + b"RGB" + bytes(1000)
    for name, value in (("ndarray:int32", data[:1] + b"\x04" + data[2:]), ("pil", picture)):
        with pytest.raises(ValueError, match="bytes"):
            encoding_of(name).decode(value + bytes(100), 0, len(value))


WRONG = b"\xfb\xff"
NOT_HELD: dict[str, list[Any]] = {
    **{name: [WRONG] for name in ENCODINGS if name not in ("bytes", "uint16", "int16", "float16")},
    "bytes": ["x"],
    "str": [WRONG, 1, "\ud800"],
    "int": [WRONG, 1.0, np.int64(1), 2**63],
    "uint8": [WRONG, np.int64(256)],
    "int8": [WRONG, 1.5, 300],
    "float16": [1e6],
    "float32": [WRONG, 2**24 + 1, np.zeros(1), "1"],
    "str_int": [1.0],
    "str_float": [1],
    "str_decimal": [1.0],
    "json": [WRONG, {1: "a"}, [{"a": (1, 2)}], {"a": np.int64(1)}, {"a": {1}}],
    "pkl": [WRONG, lambda: 0],
    "pil": [WRONG, "x", Image.new("P", (2, 2))],
    "jpeg": [WRONG, "x", Image.new("RGBA", (2, 2))],
    "list[pil]": [WRONG, "x", ["x"]],
    "jpeg_array": [WRONG, ["x"], [WRONG]],
    "ndarray": [
        *(WRONG, [1, 2], np.zeros(0), np.array(1.0), np.zeros((2, 0), np.int32), np.zeros(2, bool)),
        *(np.zeros(2, complex), np.zeros((1,) * 64, np.uint8)),
    ],
    "ndarray:int32": [WRONG, [1, 2], np.zeros(2, np.int64)],
    "ndarray:int32:2": [b"1234567", torch.zeros(2), np.zeros(3, np.int32), np.zeros((2, 1), np.int32)],
    "ndarray:int32:1": [np.array(1, np.int32)],
}


@pytest.mark.parametrize("name", NOT_HELD)
def test_a_value_that_a_column_can_not_hold_is_an_error_of_write(name: str, tmp_path: Path) -> None:
    """What would change or could not be read again is refused by the column's name, and nothing else is lost."""
    right = (VALUES.get(name) or [LOSSY.get(name)])[-1]
    with MDSWriter(columns={"i": "int", "it": name}, out=str(tmp_path)) as writer:
        for value in NOT_HELD[name]:
            with pytest.raises((TypeError, ValueError), match="Column 'it'"):
                writer.write({"i": 0, "it": value})
        writer.write({"i": 1, "it": array("int32", (int(name[-1]),)) if right is None else right})
    assert [sample["i"] for sample in read(tmp_path, allow_unsafe_types=True)] == [1]


def test_what_is_bytes_is_stored_as_it_is(tmp_path: Path) -> None:
    """In a column of any encoding, bytes count as already encoded; an error of a type is also the original's."""
    sample = {"j": jpeg_bytes(), "i": (7).to_bytes(8, "little"), "s": b"\xc3\xbc"}
    out = write(MDSWriter, tmp_path / "out", {"j": "jpeg", "i": "int", "s": "str"}, [sample])
    (found,) = read(out)
    assert (found["i"], found["s"], found["j"].size) == (7, "ü", (5, 7))
    with MDSWriter(columns={"i": "int"}, out=str(tmp_path / "other")) as writer, pytest.raises(KeyError, match="i"):
        writer.write({"x": 1})
    with pytest.raises(AttributeError):
        encoding_of("str").encode(1)


@pytest.mark.parametrize("name", ["ndarray", "ndarray:float64", "ndarray:float64:3,2", "ndarray:float64:3,400"])
def test_decoded_arrays_belong_to_the_caller(name: str, tmp_path: Path) -> None:
    """Decoded arrays are writable and aligned, outlive the reader, share no memory, and collate silently."""
    shape = (3, 400) if name.endswith("400") else (3, 2)
    samples = [{"a": b"x" * i, "n": np.full(shape, i, np.float64)} for i in range(20)]
    reader = opened(write(MDSWriter, tmp_path / "out", {"a": "bytes", "n": name}, samples))
    alone, many = [reader[i]["n"] for i in range(20)], [s["n"] for s in reader.samples([*range(20), 0])]
    reader.close()
    for found in (alone, many):
        assert all(a.flags.writeable and a.flags.aligned and a.flags.c_contiguous for a in found)
        assert torch.equal(default_collate(found[:20])[:, 0, 0], torch.arange(20.0).double())
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations([*alone, *many], 2))


def test_a_pickled_column_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    """Opening a shard with a pickled column raises, names it, and runs nothing of it; if allowed, it is read."""
    evil = type("Evil", (), {"__reduce__": lambda self: (os.mkdir, (str(tmp_path / "ran"),))})()
    out = write(MDSWriter, tmp_path / "out", {"fine": "int", "evil": "pkl"}, [{"fine": 1, "evil": evil}])
    with pytest.raises(UnsafeDataError, match=r"Column 'evil' .* allow_unsafe_types=True"):
        opened(out)
    assert not (tmp_path / "ran").exists()
    assert read(out, allow_unsafe_types=True) == [{"evil": None, "fine": 1}]
    assert (tmp_path / "ran").exists()


# Compression

FAMILIES = ("br", "bz2", "gz", "snappy", "zstd")
CONTENT = np.random.default_rng(0).integers(0, 256, 3000, np.uint8).tobytes() + b"text " * 600
"""Half of it is noise, so no block can be stored as a run."""


def decompressed(data: bytes, algorithm: str, directory: Path, *, num_bytes: int) -> bytes:
    """Return the output of `decompress_file` for bytes."""
    (directory / "zipped").write_bytes(data)
    decompress_file(str(directory / "zipped"), str(directory / "raw"), algorithm, num_bytes=num_bytes)
    return (directory / "raw").read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_library_decompresses_what_the_other_wrote(family: str, tmp_path: Path) -> None:
    """At each level; several parts or frames, or nothing, are one content; the time doesn't change the bytes."""
    original = mosaic("streaming.base.compression")
    for algorithm in [name for name in COMPRESSIONS if name.partition(":")[0] == family]:
        assert original.decompress(algorithm, compress(CONTENT, algorithm)) == CONTENT
        theirs = original.compress(algorithm, CONTENT)
        assert decompressed(theirs, algorithm, tmp_path, num_bytes=len(CONTENT)) == CONTENT
    noise = np.random.default_rng(1).integers(0, 256, 2 << 20, np.uint8).tobytes() + bytes(1 << 20)
    fast = family if family == "snappy" else f"{family}:1"
    assert decompressed(compress(noise, fast), family, tmp_path, num_bytes=len(noise)) == noise
    assert decompressed(compress(b"", family), family, tmp_path, num_bytes=0) == b""
    if family in ("gz", "bz2", "zstd"):
        both = compress(CONTENT, family) + compress(noise, fast)
        assert decompressed(both, family, tmp_path, num_bytes=len(CONTENT + noise)) == CONTENT + noise


@pytest.mark.parametrize("family", FAMILIES)
def test_no_damage_gives_content_of_another_size(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut, foreign, or of another size, a file is refused, and none is left."""
    data = compress(CONTENT, family)
    cuts = [data[:cut] for cut in (0, 1, 2, 5, 9, len(data) // 2, len(data) - 1)]
    wrong = [(other, len(CONTENT)) for other in (*cuts, b"\xff" * 100, data[1:])]
    for content, num_bytes in [(data, len(CONTENT) - 1), (data, len(CONTENT) + 1), (b"", 0), *wrong]:
        with pytest.raises(DamagedShardError):
            decompressed(content, family, tmp_path, num_bytes=num_bytes)
        assert not (tmp_path / "raw").exists()
    bomb = compress(bytes(16 << 20), family if family == "snappy" else f"{family}:1")
    left: list[int] = []
    monkeypatch.setattr("os.unlink", lambda path: left.append(Path(path).stat().st_size))
    with pytest.raises(DamagedShardError):
        decompressed(bomb, family, tmp_path, num_bytes=1000)
    assert left[0] <= 1000  # a small file that expands to much more takes no disk


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """The error for a missing optional package names it, its purpose, and how to install it."""
    for package, call in (("zstd", lambda: compress(b"", "zstd:3")), ("xxhash", lambda: digest_of(b"", "xxh64"))):
        monkeypatch.setitem(sys.modules, package, None)
        assert error_of(ImportError, call) == snapshot
