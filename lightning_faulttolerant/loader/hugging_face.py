"""Data sets of Hugging Face and pipelines of webdataset, recognized by name: neither need be installed.

Without a seed, webdataset's shuffle is seeded by the clock and the process id, so its samples can't be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_LOOKED_AT = 100  # of the attributes or items of one object


def is_hugging_face(value: object) -> bool:
    """Return whether `value` is an object of Hugging Face's library."""
    return type(value).__module__.startswith("datasets.")


def refills_its_buffer(value: object, depth: int = 3) -> bool:
    """Return whether `value` is or forwards a Hugging Face stream: the stream's state lacks its shuffle buffer."""
    if is_hugging_face(value):
        return True
    if isinstance(value, Mapping):
        held = list(value.values())
    else:
        held = list(value) if isinstance(value, (list, tuple)) else list(getattr(value, "__dict__", {}).values())
    return depth > 0 and any(refills_its_buffer(child, depth - 1) for child in held[:_LOOKED_AT])


def drawn_orders(dataset: object) -> dict[str, Sequence[Any]]:
    """Return the orders of one of their data sets. `shuffle` without a seed draws them immediately."""
    indices = getattr(dataset, "_indices", None)
    if indices is not None:
        return {"indices": _Column(indices.column(0))}
    found: dict[str, Sequence[Any]] = {}
    source, depth = getattr(dataset, "_ex_iterable", None), 0
    while source is not None:  # one wraps another: a buffer, a map, and finally the reader of the shards
        for name, value in (getattr(source, "kwargs", None) or {}).items():
            if isinstance(value, (list, tuple)) and " at 0x" not in str(value[:1]):
                found[f"source {depth} {name}"] = [_shard(item) for item in value]
        source, depth = getattr(source, "ex_iterable", None), depth + 1
    return found


def _shard(item: object) -> Any:
    # Shards of a table look alike from outside. Their first rows differ, and reading them runs no data set code.
    table = getattr(item, "_data", None)
    return item if table is None else table.slice(0, 1).to_pydict()


class _Column(Sequence[Any]):
    """A column of a table as plain numbers, read one by one."""

    def __init__(self, column: Any) -> None:
        self._column = column

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, index: Any) -> Any:
        return self._column[index].as_py()


_DEPTH = 5
_ROOT = "webdataset"
_RNG, _SEED = 2, 3  # among the arguments of its shuffle, after the data


def why_drawn_by_the_clock(dataset: object) -> str | None:
    """Return why the samples of a pipeline can't be drawn again, or ``None`` if they can."""
    for stage in _stages(dataset, _DEPTH):
        kind = type(stage).__name__
        if kind == "FilterFunction" and getattr(stage.f, "__name__", "") == "_shuffle" and not _has_seed(stage):
            return f"its {type(dataset).__name__} shuffles without a seed, by the clock. Pass shuffle a seed"
        if kind == "ResampledShards" and not stage.deterministic:
            return (
                f"its {type(dataset).__name__} resamples its shards by the clock. Give it ResampledShards with"
                " deterministic=True"
            )
    return None


def _has_seed(shuffle: Any) -> bool:
    by_position = dict(zip((_RNG, _SEED), shuffle.args[_RNG : _SEED + 1], strict=False))
    given = (shuffle.kw.get("rng", by_position.get(_RNG)), shuffle.kw.get("seed", by_position.get(_SEED)))
    return any(value is not None for value in given)


def _stages(pipeline: object, depth: int) -> Iterator[Any]:
    if not depth:
        return
    for stage in list(vars(pipeline).get("pipeline", ())) if hasattr(pipeline, "__dict__") else ():
        if (type(stage).__module__ or "").partition(".")[0] == _ROOT:
            yield stage
        yield from _stages(stage, depth - 1)
