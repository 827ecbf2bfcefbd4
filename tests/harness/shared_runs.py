"""Uninterrupted runs are computed once and shared by all cases that compare with them.

The result of such a run depends only on its `fit`, the number of ranks, the options of the callback, the environment,
and the code. These are its key: cloudpickle writes `fit` with everything that it closes over. A fit that can't be
pickled, or is pickled differently each time (as with a class that a test defines), is not shared.

Cases that differ only in how often the callback saves share a run, too. In each case, the interrupted run itself saves
as often as the case says, and equals the run without the callback.

``$SHARED_RUNS``, a directory, shares runs between suites of the same code: the CI's fast and slow tests.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from lightning_faulttolerant.testing.exactness import RunOutcome, Runs
from tests.harness import places

DIRECTORY = "SHARED_RUNS"
"""The environment variable with the directory."""

# These variables differ from test to test, or from suite to suite, but no fit depends on them.
_NO_PART_OF_A_RUN = ("PYTEST_CURRENT_TEST", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")

_HOW_OFTEN = ("every_n_train_steps",)

Uninterrupted = Callable[..., RunOutcome]


class SharedRuns:
    """Remembers the outcomes of uninterrupted runs until the process ends, or as long as `directory` exists."""

    def __init__(self, uninterrupted: Uninterrupted, directory: Path | None = None) -> None:
        self._uninterrupted = uninterrupted
        self._directory = directory
        self._outcomes: dict[str, RunOutcome] = {}
        self.is_patched: Callable[[], bool] = lambda: False
        """Whether the current test has patched something that may make its run differ from the same run elsewhere."""

    def uninterrupted(self, runs: Runs, name: str, *, with_callback: bool) -> RunOutcome:
        """Stand in for `Runs.uninterrupted`."""
        key = None if self.is_patched() else _key(runs, name, with_callback=with_callback)
        if key is None:
            return self._uninterrupted(runs, name, with_callback=with_callback)
        outcome = self._outcomes.get(key) or self._read(key)
        if outcome is None:
            outcome = self._uninterrupted(runs, name, with_callback=with_callback)
            if outcome.exit_code != 0:
                return outcome
            self._write(key, outcome)
        self._outcomes[key] = outcome
        return outcome

    def _read(self, key: str) -> RunOutcome | None:
        if self._directory is None or not (self._directory / key).exists():
            return None
        outcome: RunOutcome = pickle.loads((self._directory / key).read_bytes())
        return outcome

    def _write(self, key: str, outcome: RunOutcome) -> None:
        if self._directory is not None:
            mine = self._directory / f"{key}.{os.getpid()}"
            mine.write_bytes(pickle.dumps(outcome))
            mine.rename(self._directory / key)


def _key(runs: Runs, name: str, *, with_callback: bool) -> str | None:
    no_part = {*_NO_PART_OF_A_RUN, *places.variables_of_the_directory()}
    environment = {name: value for name, value in os.environ.items() if name not in no_part}
    options = {k: v for k, v in runs.options.items() if k not in _HOW_OFTEN} if with_callback else None
    try:
        content = cloudpickle.dumps((name, runs.fit, runs.num_ranks, options, environment, os.getcwd(), sys.prefix))
    except (pickle.PicklingError, TypeError, AttributeError, ValueError, RecursionError):
        return None
    return hashlib.sha256(content).hexdigest()


def share(monkeypatch: pytest.MonkeyPatch) -> SharedRuns:
    """Let all `Runs` of this process share their uninterrupted runs."""
    directory = os.environ.get(DIRECTORY)
    shared = SharedRuns(Runs.uninterrupted, Path(directory) if directory else None)

    def uninterrupted(self: Runs, name: str, *, with_callback: bool) -> Any:
        return shared.uninterrupted(self, name, with_callback=with_callback)

    monkeypatch.setattr(Runs, "uninterrupted", uninterrupted)
    return shared
