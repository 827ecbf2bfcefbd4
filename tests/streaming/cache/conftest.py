"""Retries of the tests come at once."""

from __future__ import annotations

import pytest

from lightning_faulttolerant.streaming.cache import attempts


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let retries follow one another without a pause."""
    monkeypatch.setattr(attempts, "_FIRST_PAUSE_SECONDS", 0.0)
