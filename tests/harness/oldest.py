"""Which laws run on the oldest Lightning: a part of those in which only the data side varies.

Loaders, samplers, and data sets know torch and no Lightning, and torch is the same in both environments. What differs
between two cases of such a law is decided before Lightning gets a batch. All other laws run with all their cases.
"""

from __future__ import annotations

import pytest

ONE_CASE_OF_THE_FILE = frozenset(
    f"tests/law/test_{name}.py"
    for name in (
        "documented_data_sets",
        "foreign_streaming",
        "generators",
        "grouped_sampler",
        "hugging_face",
        "iterable",
        "object_state_of_loaders",
        "own_states",
        "per_sample",
        "samplers",
        "streaming",
    )
)
"""Data sets, samplers, and what they keep: one seam to Lightning, which the first case of the file crosses."""
ONE_CASE_OF_EACH_LAW = frozenset({"tests/law/test_loaders.py"})
"""Loaders: each law has its way to fetch, whatever the number of workers and the cut."""


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return those of these tests that are needed; the slow ones of a law are left out before."""
    kept: dict[str, pytest.Item] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        is_slow = item.get_closest_marker("slow") is not None
        if file in ONE_CASE_OF_THE_FILE and not is_slow:
            kept.setdefault(file, item)
        elif file in ONE_CASE_OF_EACH_LAW and not is_slow:
            kept.setdefault(item.nodeid.partition("[")[0], item)
        else:
            kept[item.nodeid] = item
    return list(kept.values())
