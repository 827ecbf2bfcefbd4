"""Pipelines of webdataset that shuffle without a seed, recognized by name: webdataset need not be installed.

Without a seed, its shuffle is seeded by the clock and the process id, so its samples can't be drawn again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DEPTH = 5
_ROOT = "webdataset"
_RNG, _SEED = 2, 3  # among the arguments of its shuffle, after the data


def why_drawn_by_the_clock(dataset: Any) -> str | None:
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


def _stages(pipeline: Any, depth: int) -> Iterator[Any]:
    if not depth:
        return
    for stage in list(vars(pipeline).get("pipeline", ())) if hasattr(pipeline, "__dict__") else ():
        if (type(stage).__module__ or "").partition(".")[0] == _ROOT:
            yield stage
        yield from _stages(stage, depth - 1)
