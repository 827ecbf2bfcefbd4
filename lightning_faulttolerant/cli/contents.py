"""The contents of a checkpoint as plain values, for ``inspect``.

The description of a checkpoint becomes JSON, however large, deep, or strange it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_faulttolerant.checkpoint.described import LongData, Made, Named, Storage, TensorInfo
from lightning_faulttolerant.checkpoint.summary import Summary, walk
from lightning_faulttolerant.cli.part import mapping, own_mapping, part_of, whole_number

BLOBS = "blobs"
_REFERENCE = "blob"
# These parts are shown under their own names; the others are shown only with their sizes.
_SHOWN = (
    *("version", "world_size", "position", "run", "origin", "inexact", "behind", "skipped"),
    *("surroundings", "fingerprint"),
)
_SIZED = ("ranks", "states", "opaque", "pickled")


def describe(summary: Summary, *, path: str, states: Mapping[int, Summary]) -> dict[str, object]:
    """Return the description of a checkpoint.

    Args:
        summary: Summary of the file.
        path: Its path or URL.
        states: Summaries of the states that it keeps as bytes, by the number of the rank.
    """
    content, part = summary.content, part_of(summary.content)
    return {
        "path": path,
        "num_bytes": summary.num_bytes,
        "num_bytes_read": summary.num_bytes_read + sum(state.num_bytes_read for state in states.values()),
        "lightning": plain(mapping(content).get("pytorch-lightning_version")),
        "epoch": plain(mapping(content).get("epoch")),
        "global_step": plain(mapping(content).get("global_step")),
        "num_parameters": _num_parameters(part),
        "keys": {str(plain(key)): _size(summary, value) for key, value in mapping(content).items()},
        "kind": "dict" if isinstance(content, dict) else str(plain(content) if _is_one(content) else "list"),
        "fault_tolerance": None if part is None else _describe_part(summary, part, states),
    }


def _describe_part(summary: Summary, part: Mapping[object, object], states: Mapping[int, Summary]) -> dict[str, object]:
    kept = part.get("ranks")
    of_ranks = [
        (states[rank], states[rank].content) if rank in states else (summary, state)
        for rank, state in enumerate(kept if isinstance(kept, list) else [])
    ]
    return {
        **{name: plain(part.get(name)) for name in _SHOWN},
        "ranks": [_rank(holder, state) for holder, state in of_ranks],
        "lost": _lost([state for _, state in of_ranks]),
        "opaque": {str(name): _size(summary, value)["num_bytes"] for name, value in mapping(part, "opaque").items()},
        "pickled": _pickled(summary, part),
        "others": {
            str(plain(name)): _size(summary, value)["num_bytes"]
            for name, value in part.items()
            if name not in _SHOWN + _SIZED
        },
    }


def _pickled(summary: Summary, part: Mapping[object, object]) -> dict[str, dict[str, object]]:
    """Return the class and the size of each object that only a trusted resume unpickles."""
    return {
        str(plain(place)): {
            "class": str(plain(mapping(part, "pickled", place).get("class"))),
            "num_bytes": _size(summary, entry)["num_bytes"],
        }
        for place, entry in mapping(part, "pickled").items()
    }


def _lost(ranks: list[object]) -> dict[str, str]:
    """Return the changes made by training that the checkpoint can't carry, each with the reason."""
    place = ("objects", "lost")
    found = (lost for state in ranks for lost in (mapping(state, *place), own_mapping(state, *place)))
    return {str(plain(path)): str(plain(reason)) for lost in found for path, reason in lost.items()}


def _rank(summary: Summary, state: object) -> dict[str, int]:
    """Return the size of each part of a rank's state, including the bytes in the common pool."""
    lengths = mapping(state, BLOBS).get("lengths")
    lengths = lengths if isinstance(lengths, list) else []
    return {
        str(plain(name)): summary.size_of(value).num_bytes + _pooled(value, lengths)
        for name, value in mapping(state).items()
        if name != BLOBS
    }


def _pooled(value: object, lengths: list[object]) -> int:
    references = (
        inner[_REFERENCE] for inner in walk([value]) if isinstance(inner, dict) and set(inner) == {_REFERENCE}
    )
    numbers = {number for number in references if type(number) is int and 0 <= number < len(lengths)}
    return sum(whole_number(lengths[number]) or 0 for number in numbers)


def _num_parameters(part: Mapping[object, object] | None) -> int | None:
    shapes = mapping(part, "fingerprint", "module").get("parameters")
    if not isinstance(shapes, dict) or None in shapes.values():
        return None
    return sum(_product(shape) for shape in shapes.values())


def _product(shape: Any) -> int:
    is_shape = isinstance(shape, list) and len(shape) <= 64 and all(whole_number(n) is not None for n in shape)
    return math.prod(shape) if is_shape else 0


def _size(summary: Summary, value: object) -> dict[str, int]:
    size = summary.size_of(value)
    return {"num_bytes": size.num_bytes, "num_tensors": size.num_tensors, "num_values": size.num_values}


def _is_one(content: object) -> bool:
    return not isinstance(content, (dict, list, tuple))


_MAX_DEPTH = 24
_MAX_VALUES = 100_000
_LEFT_OUT = "..."


def plain(value: object) -> Any:
    """Return a value as dicts with string keys, lists, strings, finite numbers, booleans and None.

    Values nested more than 24 deep and values after the first 100,000 are left out.

    Args:
        value: A value of a described checkpoint.

    Example:
        >>> plain({1: (float("inf"), b"abc"), "seen": {True, }})
        {'1': ['inf', '3 bytes'], 'seen': 'a set'}
    """
    return _Plain().of(value, depth=0)


class _Plain:
    def __init__(self) -> None:
        self._num_left = _MAX_VALUES

    def of(self, value: object, *, depth: int) -> Any:
        self._num_left -= 1
        if depth > _MAX_DEPTH or self._num_left < 0:
            return _LEFT_OUT
        if isinstance(value, dict):
            return self._mapping(value, depth=depth + 1)
        if isinstance(value, (list, tuple)):
            items = [self.of(item, depth=depth + 1) for item in value[: max(self._num_left, 0)]]
            return items if len(items) == len(value) else [*items, _LEFT_OUT]
        return one(value)

    def _mapping(self, value: dict[object, object], *, depth: int) -> dict[str, object]:
        made: dict[str, object] = {}
        for key, child in value.items():
            if self._num_left < 0:
                made[_LEFT_OUT] = _LEFT_OUT
                break
            made[key if isinstance(key, str) else str(self.of(key, depth=depth))] = self.of(child, depth=depth)
        return made


def one(value: object) -> Any:
    """Return a single value, or a description of it.

    Args:
        value: A value of a described checkpoint, other than a dict, list or tuple.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= 64 else f"an integer of {value.bit_length()} bits"
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes():
            return f"{len(value)} bytes"
        case LongData(kind, num_bytes):
            return f"{kind} of {num_bytes} bytes"
        case TensorInfo(dtype, shape):
            return f"tensor of {dtype} {list(shape)}"
        case Storage(_, dtype, num_bytes):
            return f"storage of {dtype}, {num_bytes} bytes"
        case Named(name) | Made(name):
            return f"<{name}>"
    return f"a {type(value).__name__}"
