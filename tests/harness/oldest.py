"""Which laws run on the oldest Lightning: a part of those in which nothing of Lightning varies.

Loaders, samplers, and data sets know torch and no Lightning, and torch is the same in both environments. What objects
keep is found and carried without Lightning, and so are directories and files. What differs between two cases of such a
law is decided before Lightning gets a batch, or after it has given a state. All other laws run with all their cases.
"""

from __future__ import annotations

import pytest


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
"""Data sets, samplers, and what they keep: one seam to Lightning, which the first case of the file crosses."""
ONE_CASE_OF_EACH_LAW = _files(
    "any_loader",
    "async_save",
    "autosaves",
    "changing_roots",
    "full_disk",
    "iterated_aside",
    "loader_flavours",
    "loaders",
    "object_state",
    "object_state_elsewhere",
    "objects_in_checkpoints",
    "remote",
    "replayed_loaders",
    "run_elsewhere",
    "trust",
    "which_run",
)
"""Each law reaches its loaders, objects, or files in its own way, whatever the cut or the number of workers."""


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
