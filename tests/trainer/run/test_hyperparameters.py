"""Only text may differ between hyperparameters; every other difference is refused, and times are found."""

from __future__ import annotations

import argparse
import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.trainer.run import changes
from lightning_faulttolerant.trainer.run.changes import Hyperparameters, is_passing

PROCESS_ID = 31337


class Model(LightningModule):
    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.save_hyperparameters(values)


def compared(saved: Any, now: Any) -> tuple[list[str], list[str]]:
    """Return the refused differences and the reported ones."""
    return Hyperparameters(Model(**now)).compare(Hyperparameters(Model(**saved)).state_dict())


NAMESPACE, CONFIG = argparse.Namespace, OmegaConf.create
PAIRS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rate": 0.1, "name": "a", "o": {"n": "a"}}, {"rate": 0.2, "name": "b", "o": {"n": "b"}}),
    ({"flag": True, "seed": None}, {"flag": False, "seed": 0}),
    ({"name": None}, {"name": "a"}),
    ({"rate": 0.1}, {"rate": "0.1"}),
    ({"rate": "0.1"}, {"rate": 0.1}),
    ({"sizes": [1, 2], "names": ["a"]}, {"sizes": (1, 3), "names": ["a", "b"]}),
    ({"names": ["a", 1]}, {"names": ("b", 1)}),
    ({"o": {"rate": 0.1, "name": "a"}}, {"o": {"rate": 0.2, "name": "b"}}),
    ({"o": [{"rate": 1, "name": "a"}]}, {"o": [{"rate": 2, "name": "b"}]}),
    ({"note": None}, {"note": torch.ones(1)}),
    ({"note": "a"}, {"note": {"b": 1}}),
    ({}, {"name": "a"}),
    ({"name": "a"}, {}),
    ({"type": torch.float16}, {"type": torch.float32}),
    ({"set": {1, 2}, "texts": {"a", "b"}}, {"set": {1, 3}, "texts": {"a", "c"}}),
    ({"args": NAMESPACE(rate=1, n="a")}, {"args": NAMESPACE(rate=2, n="b")}),
    ({"cfg": CONFIG({"a": [1, "a"]})}, {"cfg": CONFIG({"a": [2, "b"]})}),
    ({"path": Path("a")}, {"path": Path("b")}),
    ({"a": float("nan"), "b": [float("nan"), "x"], "e": 1}, {"a": float("nan"), "b": [float("nan"), "x"], "e": 1.0}),
    ({"o": object()}, {"o": object()}),
]


def test_text_may_differ_and_nothing_else(snapshot: SnapshotAssertion) -> None:
    """Numbers, flags, None, objects, and values of one start only are refused, strings and paths are reported.

    Values that are not equal to themselves, and objects whose text is an address, give no line.
    """
    lines = []
    for saved, now in PAIRS:
        refused, reported = compared(saved, now)
        lines += [f"refused   {line}" for line in refused] + [f"reported  {line}" for line in reported]
    assert "\n".join(lines) == snapshot
    assert compared(*PAIRS[-1]) == compared(*PAIRS[-2]) == ([], [])


NOW = datetime(2026, 11, 24, 11, 57, 6).timestamp()
PASSING = [
    *(NOW, int(NOW), NOW + 80_000, NOW - 80_000, NOW * 1000, int(NOW * 1000), int(NOW * 10**9)),
    *("2026-11-24_11-57-06", "2026-11-24 11:57", "2026-11-24T11:57:06.123", "20261124-1157", "20261124_115706"),
    *("20261124115706", "exp/2026/11/24/11.57", "run_24.11.2026_11h57", "11:57 24-11-2026", "2026_11_24_11_57"),
    *(PROCESS_ID, float(PROCESS_ID), f"run-{PROCESS_ID}", f"{PROCESS_ID}", f"host:{PROCESS_ID}/a"),
]
COMMON = [
    *(0, 1, 42, 2024, 2026, 20261124, 1e-3, 0.999, 1e9, 10**9, 1e12, 1e18, 2**31, 2**32 - 1, 2**63, 10**400),
    *(float("inf"), float("nan"), True, False, None, 30522, 32000, 50257, 128256, 1024, 4096, 0.0),
    *("adam", "resnet-50", "2026-11-24", "20261124", "v2026.11", "imagenet-2012", "12:30", "data/2025-11-24_11-57"),
    *("a31337b", "313370", "model-20251124-1157", "s3://bucket/2026", "1e-3", "", "2026-11-24-99-99"),
    *("id-120261124-1157", NOW + 90_000, NOW - 90_000, NOW * 10),
]


@pytest.mark.parametrize(("values", "expected"), [(PASSING, True), (COMMON, False)], ids=["passing", "common"])
def test_times_and_process_ids_are_found(values: list[Any], expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In seconds to nanoseconds, as a date with a time of day, or as a word; common values are not taken for them."""
    monkeypatch.setattr(os, "getpid", lambda: PROCESS_ID)
    monkeypatch.setattr(changes, "IMPORTED_AT", NOW)
    assert [value for value in values if is_passing(value, now=NOW) is not expected] == []
    monkeypatch.setattr(os, "getpid", lambda: 64)  # as common as a batch size in a container
    assert not is_passing(64, now=NOW)
    # The day in Greenwich counts, and the day on which the process began.
    monkeypatch.setattr(changes, "IMPORTED_AT", NOW - 86_400)
    there = datetime.fromtimestamp(NOW, timezone.utc)
    days = [is_passing(f"{there - timedelta(days=number):%Y-%m-%d %H:%M}", now=NOW) for number in range(3)]
    assert days == [True, True, False]
