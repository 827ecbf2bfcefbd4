"""Retries in the tests follow without a pause, and on a busy machine no test takes a slow download for a hang."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from lightning_faulttolerant.streaming.cache import downloads
from tests.streaming.remotes import Faults


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries follow one another without a pause."""
    monkeypatch.setattr(downloads, "_FIRST_PAUSE_SECONDS", 0.0)


@pytest.fixture
def _only_what_hangs_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start the clock of an attempt when it hangs: an attempt that succeeds or fails has all the time it needs."""
    result_of = downloads.result_in_time

    def result_in_time(future: concurrent.futures.Future[Any], timeout_seconds: float) -> Any:
        while not future.done() and not Faults.is_stuck.wait(0.002):
            pass
        try:
            return result_of(future, timeout_seconds)
        finally:
            Faults.is_stuck.clear()

    Faults.is_stuck.clear()
    monkeypatch.setattr(downloads, "result_in_time", result_in_time)
