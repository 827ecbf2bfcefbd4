"""Uninterrupted runs are computed once and shared by all cases that compare with them.

The result of such a run depends only on its `fit`, the number of ranks, the options of the callback, the environment,
and the code. These are its key: cloudpickle writes `fit` with everything that it closes over. A fit that can't be
pickled, or is pickled differently each time (as with a class that a test defines), is not shared.

Cases that differ only in how often the callback saves share a run, too. In each case, the interrupted run itself saves
as often as the case says, and equals the run without the callback.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from lightning_faulttolerant.testing.exactness import Runs
from lightning_faulttolerant.testing.traces import RunOutcome

# These variables differ from test to test, but no fit depends on them.
_NO_PART_OF_A_RUN = ("PYTEST_CURRENT_TEST",)

_HOW_OFTEN = ("every_n_train_steps",)

Uninterrupted = Callable[..., RunOutcome]


class SharedRuns:
    """Remembers the outcomes of uninterrupted runs until the process ends."""

    def __init__(self, uninterrupted: Uninterrupted) -> None:
        self._uninterrupted = uninterrupted
        self._outcomes: dict[bytes, RunOutcome] = {}
        self.is_patched: Callable[[], bool] = lambda: False
        """Whether the current test has patched something that may make its run differ from the same run elsewhere."""

    def uninterrupted(self, runs: Runs, name: str, *, with_callback: bool) -> RunOutcome:
        """Stand in for `Runs.uninterrupted`."""
        key = None if self.is_patched() else _key(runs, name, with_callback=with_callback)
        if key is None or key not in self._outcomes:
            outcome = self._uninterrupted(runs, name, with_callback=with_callback)
            if key is None or outcome.exit_code != 0:
                return outcome
            self._outcomes[key] = outcome
        return self._outcomes[key]


def _key(runs: Runs, name: str, *, with_callback: bool) -> bytes | None:
    environment = {name: value for name, value in os.environ.items() if name not in _NO_PART_OF_A_RUN}
    options = {k: v for k, v in runs.options.items() if k not in _HOW_OFTEN} if with_callback else None
    try:
        content = cloudpickle.dumps((name, runs.fit, runs.num_ranks, options, environment, os.getcwd()))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(content).digest()


def share(monkeypatch: pytest.MonkeyPatch) -> SharedRuns:
    """Let all `Runs` of this process share their uninterrupted runs."""
    shared = SharedRuns(Runs.uninterrupted)

    def uninterrupted(self: Runs, name: str, *, with_callback: bool) -> Any:
        return shared.uninterrupted(self, name, with_callback=with_callback)

    monkeypatch.setattr(Runs, "uninterrupted", uninterrupted)
    return shared
