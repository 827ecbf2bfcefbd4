"""Select the tests that run on the oldest Lightning: one case of each law, and all tests of modules.

The cases of a law differ in the cut, the loader, or the number of workers; the newest Lightning runs all of them. What
differs between versions of Lightning is the law's way through the loops, which each case takes. Loaders, samplers, and
data sets use torch but not Lightning, and torch is the same in both environments.
"""

from __future__ import annotations

import pytest

LAWS = "tests/law/"


def _files(*names: str) -> frozenset[str]:
    return frozenset(f"tests/law/test_{name}.py" for name in names)


ONE_CASE_OF_THE_FILE = _files(
    "attributes_of_loaders",
    "documented_data_sets",
    "foreign_streaming",
    "generators",
    "grouped_sampler",
    "hugging_face",
    "iterable",
    "lhotse",
    "object_state_as_bytes",
    "object_state_of_functions",
    "object_state_of_loaders",
    "own_states",
    "per_sample",
    "samplers",
    "streaming",
    "web_dataset",
)
"""Data sets, samplers, and their state. They meet Lightning in one place, and the first case of the file covers it."""


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests to run. Slow tests stay, and never count as the first case."""
    kept: dict[str, pytest.Item] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        is_slow = item.get_closest_marker("slow") is not None
        if file in ONE_CASE_OF_THE_FILE and not is_slow:
            kept.setdefault(file, item)
        elif file.startswith(LAWS) and not is_slow:
            kept.setdefault(item.nodeid.partition("[")[0], item)
        else:
            kept[item.nodeid] = item
    return list(kept.values())
