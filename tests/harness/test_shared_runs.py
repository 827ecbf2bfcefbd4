from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.testing.exactness import RunOutcome, Runs
from tests.harness.shared_runs import SharedRuns


class Counted:
    """Stands in for the real runs, and counts them."""

    def __init__(self, *exit_codes: int) -> None:
        self.exit_codes = list(exit_codes)
        self.num_runs = 0

    def __call__(self, runs: Runs, name: str, *, with_callback: bool) -> RunOutcome:
        self.num_runs += 1
        return RunOutcome(exit_code=self.exit_codes.pop(0) if self.exit_codes else 0, traces=[], output="")


def runs_of(fit: Callable[..., Any], directory: Path, *, num_ranks: int = 1, **options: Any) -> Runs:
    """Return the runs of a case."""
    return Runs(fit, directory, options, 60.0, num_ranks=num_ranks)


def fit_with(value: Any) -> Callable[..., Any]:
    """Return a fit that closes over a value."""
    return lambda callbacks, directory: value


@pytest.fixture
def counted() -> Counted:
    """The counted runs."""
    return Counted()


@pytest.fixture
def shared(counted: Counted) -> SharedRuns:
    """Shared runs."""
    return SharedRuns(counted)


def ask(shared: SharedRuns, runs: Runs, name: str = "uninterrupted", *, with_callback: bool = False) -> RunOutcome:
    """Request an uninterrupted run."""
    return shared.uninterrupted(runs, name, with_callback=with_callback)


def test_the_same_fit_runs_once(shared: SharedRuns, counted: Counted, tmp_path: Path) -> None:
    """Two cases that start from the same fit share its run, even in different directories."""
    first = ask(shared, runs_of(fit_with(1), tmp_path / "one"))
    assert ask(shared, runs_of(fit_with(1), tmp_path / "other")) is first
    assert counted.num_runs == 1


def test_options_are_no_part_of_a_run_without_the_callback(
    shared: SharedRuns, counted: Counted, tmp_path: Path
) -> None:
    """Cases that save differently share the run without the callback, but not the run with it."""
    for keeps in (1, 13):
        runs = runs_of(fit_with(1), tmp_path, keep_last=keeps)
        ask(shared, runs)
        ask(shared, runs, "with-callback", with_callback=True)
    assert counted.num_runs == 3


def test_how_often_a_run_saves_is_no_part_of_it(shared: SharedRuns, counted: Counted, tmp_path: Path) -> None:
    """Cases that differ only in the steps between two saves share the run with the callback, too."""
    for every in (1, 13):
        ask(shared, runs_of(fit_with(1), tmp_path, every_n_train_steps=every), "with-callback", with_callback=True)
    assert counted.num_runs == 1


def test_what_a_fit_depends_on_makes_it_another(
    shared: SharedRuns, counted: Counted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another value in the closure, name, number of ranks, working directory or environment makes it another run."""
    ask(shared, runs_of(fit_with(1), tmp_path))
    ask(shared, runs_of(fit_with(2), tmp_path))
    ask(shared, runs_of(fit_with(1), tmp_path), "another name")
    ask(shared, runs_of(fit_with(1), tmp_path, num_ranks=2))
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    ask(shared, runs_of(fit_with(1), tmp_path))
    monkeypatch.delenv("PL_SEED_WORKERS")
    monkeypatch.chdir(tmp_path)
    ask(shared, runs_of(fit_with(1), tmp_path))
    assert counted.num_runs == 6


def test_nothing_is_shared_where_a_test_has_replaced_something(
    shared: SharedRuns, counted: Counted, tmp_path: Path
) -> None:
    """A test that patches a module gets its own run, and shares none with other tests."""
    patched = True
    shared.is_patched = lambda: patched
    ask(shared, runs_of(fit_with(1), tmp_path))
    patched = False
    ask(shared, runs_of(fit_with(1), tmp_path))
    assert counted.num_runs == 2


def test_patches_of_a_law_are_seen(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The fixture of all laws checks at the time of the run whether `monkeypatch` has replaced something."""
    shared = SharedRuns(Counted())
    shared.is_patched = lambda: bool(monkeypatch._setattr)
    assert not shared.is_patched()
    monkeypatch.setattr(os, "getcwd", os.getcwd)
    assert shared.is_patched()


def test_a_failed_run_is_not_shared(tmp_path: Path) -> None:
    """The next case repeats a run that failed."""
    counted = Counted(1)
    shared = SharedRuns(counted)
    assert [ask(shared, runs_of(fit_with(1), tmp_path)).exit_code for _ in range(3)] == [1, 0, 0]
    assert counted.num_runs == 2


def test_a_fit_that_cannot_be_pickled_runs_each_time(shared: SharedRuns, counted: Counted, tmp_path: Path) -> None:
    """If the fit holds an object that can't be pickled, such as a lock, its run is not shared."""
    lock = threading.Lock()
    for _ in range(2):
        ask(shared, runs_of(fit_with(lock), tmp_path))
    assert counted.num_runs == 2


def test_suites_share_runs_through_a_directory(tmp_path: Path) -> None:
    """A second process with the same directory reads what the first one has written, and runs only what is new."""
    counted = Counted()
    first, second = SharedRuns(counted, tmp_path), SharedRuns(counted, tmp_path)
    assert ask(first, runs_of(fit_with(1), tmp_path)) == ask(second, runs_of(fit_with(1), tmp_path))
    assert counted.num_runs == 1
    ask(second, runs_of(fit_with(2), tmp_path))
    assert counted.num_runs == 2
