"""Caches that a data set fills by itself: what it builds again from the index of a sample is no state.

The rule is tried out in a worker, on the data set itself, once a cache is too large to be carried.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.state.objects.kinds import fill, items_of, pairs_of
from lightning_faulttolerant.state.objects.object_state import digest_of_value


def is_built_again(cache: Any, dataset: Any) -> bool:
    """Return whether `cache` is filled by `dataset`, and each value depends on nothing but the index of a sample.

    Some samples are loaded again, with an empty cache and other random numbers. Then the cache is as before.
    """
    kept = pairs_of(cache) if isinstance(cache, dict) else items_of(cache)
    try:
        old = {key: digest_of_value(value) for key, value in _filled(cache)}
        first, second = _built(cache, len(kept), dataset), _built(cache, len(kept), dataset)
        return bool(first) and first == second and all(old[key] == first[key] for key in first.keys() & old.keys())
    except Exception:  # noqa: BLE001 - the user's own code, in a situation that it need not know
        return False
    finally:
        fill(cache, kept)


def _built(cache: Any, length: int, dataset: Any) -> dict[object, object]:
    """Return a digest of each value that the empty `cache` gets when samples are loaded twice."""
    fill(cache, [] if isinstance(cache, dict) else [None] * length)
    found = []
    for _ in range(2):
        for index in {0, len(dataset) // 2, len(dataset) - 1}:
            dataset[index]
        found.append({key: digest_of_value(value) for key, value in _filled(cache)})
    grows = isinstance(cache, list) and len(cache) != length
    return {} if grows or found[0] != found[1] else found[0]


def _filled(cache: Any) -> Iterator[tuple[Any, object]]:
    pairs = pairs_of(cache) if isinstance(cache, dict) else enumerate(cache)
    return ((key, value) for key, value in pairs if value is not None)
