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


FILES = frozenset({"tests/trainer/test_remote_run.py"})
"""Files of autosaves and where they are: written after the state was captured, by code that Lightning never calls."""

ONE_CASE_OF_THE_FILE = FILES


def select(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests to run. Slow tests stay, and never count as the first case."""
    kept: dict[str, pytest.Item] = {}
    for item in items:
        file = item.nodeid.partition("::")[0]
        is_slow = item.get_closest_marker("slow") is not None
        law = item.nodeid.partition("[")[0]
        if file in ONE_CASE_OF_THE_FILE and not is_slow:
            kept.setdefault(file, item)
        elif file.startswith(LAWS) and not is_slow:
            kept.setdefault(law, item)
        else:
            kept[item.nodeid] = item
    return list(kept.values())
