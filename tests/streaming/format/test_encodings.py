import contextlib
import io
import itertools
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch.utils.data import default_collate

from lightning_faulttolerant.errors import UnsafeDataError
from lightning_faulttolerant.streaming.format.index import ENCODINGS, encoding_of
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from tests.foreign import mosaic
from tests.streaming.format.shards import opened, read, same, write

DTYPES = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
SHAPES = ((1,), (3,), (255,), (256,), (2, 3), (1, 300, 2), (1,) * 12)


def image(mode: str = "RGB", size: tuple[int, int] = (5, 7)) -> Image.Image:
    """Return a picture with different pixels."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return Image.frombytes(mode, size, pixels.tobytes()) if mode != "1" else Image.new("1", size, 1)


def jpeg_bytes(size: tuple[int, int] = (5, 7)) -> bytes:
    """Return a picture as a file."""
    file = io.BytesIO()
    image(size=size).save(file, format="JPEG")
    return file.getvalue()


def array(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return an array with different values."""
    return np.random.default_rng(0).integers(0, 100, shape).astype(dtype)


# The values that each encoding may hold, and the value that comes back if it differs.
CASES: list[tuple[str, Any]] = [
    *(("bytes", value) for value in (b"", b"\x00\xff" * 9)),
    *(("str", value) for value in ("", "grün 猫 \x00")),
    *(("int", value) for value in (0, -1, 2**63 - 1, -(2**63))),
    *((dtype, np.dtype(dtype).type(value)) for dtype in DTYPES for value in (0, 1, 100)),
    *(("str_int", value) for value in (0, -(10**30))),
    *(("str_float", value) for value in (0.1, float("inf"), -1e-300)),
    *(("str_decimal", Decimal(value)) for value in ("0.10", "-1E+400")),
    *(("json", value) for value in ({"b": [1, None, "ü"], "a": 1.5}, [], "x", 7)),
    *(("ndarray", array(dtype, shape)) for dtype in DTYPES for shape in SHAPES),
    *((f"ndarray:{dtype}", array(dtype, shape)) for dtype in DTYPES for shape in SHAPES),
    *((f"ndarray:{d}:{','.join(map(str, shape))}", array(d, shape)) for d in DTYPES for shape in SHAPES),
    ("ndarray:uint8", array("uint8", (70_000,))),
    *(("pil", image(mode)) for mode in ("RGB", "L", "RGBA", "1")),
    *(("png", image(mode)) for mode in ("RGB", "L", "RGBA")),
    *(("list[pil]", [image()] * n) for n in (0, 1, 3)),
    *(("list[png]", [image(size=(n, 2)) for n in range(1, 4)]) for _ in (0,)),
    ("pkl", {"a": {1, 2}}),
]


@pytest.mark.parametrize("name", sorted({name for name, _ in CASES}, key=str))
def test_bytes_are_those_of_the_original_and_values_come_back(name: str) -> None:
    """Each value has the same bytes as in the original, and is decoded from them, alone and among others."""
    original = mosaic("streaming.base.format.mds.encodings")
    encoding = encoding_of(name)
    assert encoding.size == original.get_mds_encoded_size(name)
    for value in [value for case, value in CASES if case == name]:
        data = encoding.encode(value)
        assert data == original.mds_encode(name, value)
        assert encoding.size in (None, len(data))
        assert same(encoding.decode(data, 0, len(data)), value)
        assert same(encoding.decode(b"123" + data + b"4", 3, 3 + len(data)), value)


def test_the_names_are_those_of_the_original() -> None:
    """Every encoding of the original exists, and no other."""
    assert set(ENCODINGS) == mosaic("streaming.base.format.mds.encodings").get_mds_encodings()


@pytest.mark.parametrize("name", ["list[pil]", "list[jpeg]", "list[png]", "jpeg", "jpegarray", "jpeg_array"])
def test_images_are_those_that_the_original_decodes(name: str) -> None:
    """Pictures with lossy encodings have the original's bytes and its pixels."""
    original = mosaic("streaming.base.format.mds.encodings")
    one = jpeg_bytes() if name.startswith("jpeg_") or name == "jpegarray" else image()
    value = one if name == "jpeg" else [one, one]
    data = encoding_of(name).encode(value)
    assert data == original.mds_encode(name, value)
    assert same(encoding_of(name).decode(data, 0, len(data)), original.mds_decode(name, data))


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bytes", "x"),
        ("str", 1),
        ("int", 1.0),
        ("int", np.int64(1)),
        ("str_int", 1.0),
        ("str_float", 1),
        ("str_decimal", 1.0),
        ("ndarray", [1, 2]),
        ("ndarray:int32", [1, 2]),
        ("ndarray:int32:2", torch.zeros(2)),
        *((name, "x") for name in ("pil", "jpeg", "png", "list[pil]", "list[jpeg]", "list[png]")),
        ("list[pil]", ["x"]),
        ("jpeg_array", ["x"]),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    """A column holds the type of its encoding, and the error names both types."""
    with pytest.raises(TypeError, match=r"holds .*, got ") as raised:
        encoding_of(name).encode(value)
    assert isinstance(raised.value, AttributeError)  # what the original raises


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("int", 2**63),
        ("uint8", np.int64(256)),
        ("int8", 1.5),
        ("uint32", np.int64(-1)),
        ("float16", 1e6),
        ("float32", 2**24 + 1),
        ("json", {1: "a"}),
        ("json", [{"a": (1, 2)}]),
        ("pil", Image.new("P", (2, 2))),
        ("ndarray", np.zeros(0)),
        ("ndarray", np.array(1.0)),
        ("ndarray", np.zeros((2, 0), np.int32)),
        ("ndarray", np.zeros(2, bool)),
        ("ndarray", np.zeros(2, complex)),
        ("ndarray:int32", np.zeros(2, np.int64)),
        ("ndarray:int32:2", np.zeros(3, np.int32)),
        ("ndarray:int32:2", np.zeros((2, 1), np.int32)),
        ("ndarray:int32:1", np.array(1, np.int32)),
        ("ndarray", np.zeros((1,) * 64, np.uint8)),
    ],
)
def test_a_value_that_would_change_is_refused(name: str, value: Any) -> None:
    """A value that can't be stored unchanged is an error, not another value."""
    with pytest.raises(ValueError, match=r".+"):
        encoding_of(name).encode(value)


@pytest.mark.parametrize("name", ["no", "", "int:3", "str:", "ndarray:bool", "ndarray:int32:", "ndarray:int32:2:3"])
def test_an_unknown_encoding_is_refused_by_reader_and_writer(name: str, tmp_path: Path) -> None:
    """An unknown encoding is refused, by the writer before anything is written."""
    with pytest.raises(ValueError, match=r".+"):
        encoding_of(name)
    with pytest.raises(TypeError, match="MDSWriter can't write columns"):
        MDSWriter(columns={"a": name}, out=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [name for name in ENCODINGS if name not in ("bytes", "str", "json", "pkl")])
@given(data=st.binary(max_size=40))
@settings(deadline=None, max_examples=40)
def test_bytes_of_anything_else_are_refused(name: str, data: bytes) -> None:
    """Bytes that do not encode a value are a ValueError or the like, or happen to encode another one."""
    with contextlib.suppress(ValueError, LookupError, OSError, ArithmeticError):
        encoding_of(name).decode(data, 0, len(data))


def test_an_array_does_not_take_bytes_after_it() -> None:
    """A shape that needs more bytes than the value has is an error, though the file continues."""
    data = bytearray(encoding_of("ndarray:int32").encode(np.zeros((2, 3), np.int32)))
    data[1] = 4
    for number_of_bytes_after in (0, 100):
        with pytest.raises(ValueError, match="24 bytes, its encoding 48"):
            encoding_of("ndarray:int32").decode(bytes(data) + bytes(number_of_bytes_after), 0, len(data))


def test_a_picture_of_more_pixels_than_bytes_is_not_made_room_for() -> None:
    """A header that claims a large picture is refused before any memory is allocated."""
    data = np.array([5000, 6000, 3], "<u4").tobytes() + b"RGB" + bytes(1000)
    with pytest.raises(ValueError, match="5000 x 6000 pixels in 1015 bytes"):
        encoding_of("pil").decode(data, 0, len(data))


def test_what_is_bytes_is_stored_as_it_is(tmp_path: Path) -> None:
    """In a column of any encoding, bytes count as already encoded; only what can be read is taken."""
    data = jpeg_bytes()
    sample = {"j": data, "i": (7).to_bytes(8, "little"), "s": b"\xc3\xbc"}
    out = write(MDSWriter, tmp_path / "out", {"j": "jpeg", "i": "int", "s": "str"}, [sample])
    (found,) = read(out)
    assert (found["i"], found["s"], found["j"].size) == (7, "ü", (5, 7))
    with MDSWriter(columns={"i": "int"}, out=str(tmp_path / "other")) as writer, pytest.raises(KeyError, match="i"):
        writer.write({"x": 1})


WRONG = b"\xfb\xff"


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        *((name, WRONG, ValueError) for name in ENCODINGS if name not in ("bytes", "uint16", "int16", "float16")),
        ("ndarray:int32", WRONG, ValueError),
        ("ndarray:int32:2", b"1234567", ValueError),
        ("jpeg_array", [WRONG], ValueError),
        ("jpeg", Image.new("RGBA", (2, 2)), ValueError),
        ("int", 2**63, ValueError),
        ("int8", 300, ValueError),
        ("float32", np.zeros(1), TypeError),
        ("float32", "1", TypeError),
        ("str", "\ud800", ValueError),
        ("json", {"a": np.int64(1)}, TypeError),
        ("json", {"a": {1}}, TypeError),
        ("pkl", lambda: 0, ValueError),
    ],
)
def test_a_value_that_a_column_can_not_hold_is_an_error_of_write(
    name: str, value: Any, kind: type[Exception], tmp_path: Path
) -> None:
    """What could not be read again is refused where it is written, by the column's name, and nothing else is lost."""
    with MDSWriter(columns={"i": "int", "it": name}, out=str(tmp_path)) as writer:
        with pytest.raises(kind, match="Column 'it'"):
            writer.write({"i": 0, "it": value})
        writer.write({"i": 1, "it": _right(name)})
    assert [sample["i"] for sample in read(tmp_path, allow_unsafe_types=True)] == [1]


def _right(name: str) -> Any:
    value = next((value for case, value in CASES if case == name), None)
    if value is None:
        value = {"ndarray:int32:2": array("int32", (2,)), "jpeg": image()}.get(name, [jpeg_bytes()])
    return [image()] if name.startswith("list") else value


@pytest.mark.parametrize("name", ["ndarray", "ndarray:float64", "ndarray:float64:3,2", "ndarray:float64:3,400"])
def test_decoded_arrays_belong_to_the_caller(name: str, tmp_path: Path) -> None:
    """Decoded arrays are writable and aligned, outlive the reader, share no memory, and collate silently."""
    shape = (3, 400) if name.endswith("400") else (3, 2)
    samples = [{"a": b"x" * i, "n": np.full(shape, i, np.float64)} for i in range(20)]
    out = write(MDSWriter, tmp_path / "out", {"a": "bytes", "n": name}, samples)
    reader = opened(out)
    alone, many = [reader[i]["n"] for i in range(20)], [s["n"] for s in reader.samples([*range(20), 0])]
    reader.close()
    for found in (alone, many):
        assert all(a.flags.writeable and a.flags.aligned and a.flags.c_contiguous for a in found)
        assert torch.equal(
            default_collate(found[:20]), torch.arange(20.0).double().reshape(20, 1, 1).expand(20, *shape)
        )
    many[0][:] = -1
    alone[0][:] = -1
    assert [a.flat[0] for a in many[1:]] == [*range(1, 20), 0]
    assert not any(np.shares_memory(a, b) for a, b in itertools.combinations(many, 2))


class Malicious:
    """Creates a directory when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickled_column_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    """Opening a shard with a pickled column raises, names it, and runs nothing of it; if allowed, it is read."""
    sample = {"fine": 1, "evil": Malicious(tmp_path / "ran")}
    out = write(MDSWriter, tmp_path / "out", {"fine": "int", "evil": "pkl"}, [sample])
    with pytest.raises(UnsafeDataError, match=r"Column 'evil' .* allow_unsafe_types=True"):
        opened(out)
    assert not (tmp_path / "ran").exists()
    assert read(out, allow_unsafe_types=True) == [{"evil": None, "fine": 1}]
    assert (tmp_path / "ran").exists()
