from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the syncs: the data sets of these tests have many small shards; one test checks that each is synced."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
