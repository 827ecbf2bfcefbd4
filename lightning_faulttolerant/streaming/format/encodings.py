"""All encodings of MDS columns, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from decimal import Decimal

from lightning_faulttolerant.streaming.format.arrays import DTYPES, array_encoding
from lightning_faulttolerant.streaming.format.encoding import Encoding
from lightning_faulttolerant.streaming.format.images import ImageFile, ImageList, JpegArray, RawImage
from lightning_faulttolerant.streaming.format.plain import Bytes, Digits, Int, Json, Pickled, Scalar, Str

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
            f"there is no encoding {name!r}; those known are {', '.join(ENCODINGS)}, ndarray:<dtype>[:<shape>]"
        )
    return _MAKERS[name]()
