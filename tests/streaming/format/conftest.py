from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data sets of these tests have many small shards, each of which is synced; one test says that they are."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
