"""Select the laws that run on the oldest Lightning. Some laws don't depend on Lightning and run only in part.

Loaders, samplers, and data sets use torch but not Lightning, and torch is the same in both environments. The state of
objects is found and carried without Lightning, and so are directories and files. Two cases of such a law differ only
before Lightning gets a batch or after it has returned a state. All other laws run with all their cases.
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
"""Data sets, samplers, and their state. They meet Lightning in one place, and the first case of the file covers it."""
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
    """Return the tests to run. Slow tests stay, and never count as the first case."""
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
