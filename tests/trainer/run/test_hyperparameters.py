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

from lightning_faulttolerant.trainer.run import changes
from lightning_faulttolerant.trainer.run.changes import Hyperparameters, is_passing

PROCESS_ID = 31337


class Model(LightningModule):
    """Has any hyperparameters."""

    def __init__(self, **values: Any) -> None:
        super().__init__()
        self.save_hyperparameters(values)


def compared(saved: Any, now: Any) -> tuple[list[str], list[str]]:
    """Return the refused differences and the reported ones."""
    return Hyperparameters(Model(**now)).compare(Hyperparameters(Model(**saved)).state_dict())


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"rate": 0.1}, {"rate": 0.2}, "rate: 0.1 when it was saved, 0.2 now"),
        ({"flag": True}, {"flag": False}, "flag: True when it was saved, False now"),
        ({"seed": None}, {"seed": 0}, "seed: None when it was saved, 0 now"),
        ({"name": None}, {"name": "a"}, "name: None when it was saved, 'a' now"),
        ({"rate": 0.1}, {"rate": "0.1"}, "rate: 0.1 when it was saved, '0.1' now"),
        ({"rate": "0.1"}, {"rate": 0.1}, "rate: '0.1' when it was saved, 0.1 now"),
        ({"sizes": [1, 2]}, {"sizes": (1, 3)}, "sizes.1: 2 when it was saved, 3 now"),
        ({"names": ["a"]}, {"names": ["a", "b"]}, "names: ['a'] when it was saved, ['a', 'b'] now"),
        (
            {"o": {"rate": 0.1, "name": "a"}},
            {"o": {"rate": 0.2, "name": "a"}},
            "o.rate: 0.1 when it was saved, 0.2 now",
        ),
        ({"o": [{"rate": 1}]}, {"o": [{"rate": 2}]}, "o.0.rate: 1 when it was saved, 2 now"),
        ({"note": None}, {"note": torch.ones(1)}, "note: None when it was saved, [1.0] now"),
        ({"note": "a"}, {"note": {"b": 1}}, "note: 'a' when it was saved, {'b': 1} now"),
        ({}, {"name": "a"}, "name: 'nothing' when it was saved, 'a' now"),
        ({"name": "a"}, {}, "name: 'a' when it was saved, 'nothing' now"),
        (
            {"type": torch.float16},
            {"type": torch.float32},
            "type: 'torch.float16' when it was saved, 'torch.float32' now",
        ),
        ({"set": {1, 2}}, {"set": {1, 3}}, "set.1: '2' when it was saved, '3' now"),
        (
            {"args": argparse.Namespace(rate=1)},
            {"args": argparse.Namespace(rate=2)},
            "args.rate: 1 when it was saved, 2 now",
        ),
        (
            {"cfg": OmegaConf.create({"a": [1]})},
            {"cfg": OmegaConf.create({"a": [2]})},
            "cfg.a.0: 1 when it was saved, 2 now",
        ),
    ],
)
def test_what_is_not_text_is_refused(saved: Any, now: Any, expected: str) -> None:
    """Numbers, flags, None, objects, and values that exist in one start only are refused, wherever they are."""
    assert compared(saved, now) == ([f"hyperparameters.{expected}"], [])


@pytest.mark.parametrize(
    ("saved", "now", "expected"),
    [
        ({"name": "a"}, {"name": "b"}, "name: 'a' when it was saved, 'b' now"),
        (
            {"o": {"rate": 0.1, "name": "a"}},
            {"o": {"rate": 0.1, "name": "b"}},
            "o.name: 'a' when it was saved, 'b' now",
        ),
        ({"names": ["a", 1]}, {"names": ("b", 1)}, "names.0: 'a' when it was saved, 'b' now"),
        ({"o": [{"name": "a"}]}, {"o": [{"name": "b"}]}, "o.0.name: 'a' when it was saved, 'b' now"),
        (
            {"path": Path("a")},
            {"path": Path("b")},
            "path: \"PosixPath('a')\" when it was saved, \"PosixPath('b')\" now",
        ),
        ({"set": {"a", "b"}}, {"set": {"a", "c"}}, "set.1: 'b' when it was saved, 'c' now"),
        (
            {"args": argparse.Namespace(n="a")},
            {"args": argparse.Namespace(n="b")},
            "args.n: 'a' when it was saved, 'b' now",
        ),
        ({"cfg": OmegaConf.create(["a"])}, {"cfg": OmegaConf.create(["b"])}, "cfg.0: 'a' when it was saved, 'b' now"),
    ],
)
def test_text_that_differs_is_reported(saved: Any, now: Any, expected: str) -> None:
    """Strings and paths are only reported, alone and in dicts and lists."""
    assert compared(saved, now) == ([], [f"hyperparameters.{expected}"])


def test_what_is_the_same_gives_no_line() -> None:
    """Values that are not equal to themselves, and objects whose text is an address, give no line either."""
    values = {"a": float("nan"), "b": [float("nan"), "x"], "c": {"d": None}, "e": 1}
    assert compared({**values, "o": object()}, {**values, "o": object(), "e": 1.0}) == ([], [])
    assert Hyperparameters(Model(note=object())).state_dict()["note"] == "a object"


def test_each_difference_has_its_line() -> None:
    """Refused and reported differences are returned separately."""
    refused, reported = compared({"name": "a", "rate": 1, "o": {"n": "a"}}, {"name": "b", "rate": 2, "o": {"n": "b"}})
    assert (len(refused), len(reported)) == (1, 2)


@pytest.fixture
def process_id(monkeypatch: pytest.MonkeyPatch) -> int:
    """Give this process a known id."""
    monkeypatch.setattr(os, "getpid", lambda: PROCESS_ID)
    return PROCESS_ID


NOW = datetime(2026, 11, 24, 11, 57, 6).timestamp()

PASSING = [
    *(NOW, int(NOW), NOW + 80_000, NOW - 80_000, NOW * 1000, int(NOW * 1000), int(NOW * 10**9)),
    *("2026-11-24_11-57-06", "2026-11-24 11:57", "2026-11-24T11:57:06.123", "20261124-1157", "20261124_115706"),
    *("20261124115706", "exp/2026/11/24/11.57", "run_24.11.2026_11h57", "11:57 24-11-2026", "2026_11_24_11_57"),
    *(PROCESS_ID, float(PROCESS_ID), f"run-{PROCESS_ID}", f"{PROCESS_ID}", f"host:{PROCESS_ID}/a"),
]


@pytest.mark.parametrize("value", PASSING, ids=repr)
def test_time_and_process_id_are_found(value: Any, process_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are found in seconds, milliseconds and nanoseconds; in text, as a date with a time of day, or as a word."""
    monkeypatch.setattr(changes, "IMPORTED_AT", NOW)
    assert is_passing(value, now=NOW)


COMMON = [
    *(0, 1, 42, 2024, 2026, 20261124, 1e-3, 0.999, 1e9, 10**9, 1e12, 1e18, 2**31, 2**32 - 1, 2**63, 10**400),
    *(float("inf"), float("nan"), True, False, None, 30522, 32000, 50257, 128256, 1024, 4096, 0.0),
    *("adam", "resnet-50", "2026-11-24", "20261124", "v2026.11", "imagenet-2012", "12:30", "data/2025-11-24_11-57"),
    *(
        "a31337b",
        "313370",
        "model-20251124-1157",
        "s3://bucket/2026",
        "1e-3",
        "",
        "2026-11-24-99-99",
        "id-120261124-1157",
    ),
    *(NOW + 90_000, NOW - 90_000, NOW * 10),
]


@pytest.mark.parametrize("value", COMMON, ids=repr)
def test_common_values_are_no_time(value: Any, process_id: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds, sizes, rates, versions, names, and other days are not taken for times."""
    monkeypatch.setattr(changes, "IMPORTED_AT", NOW)
    assert not is_passing(value, now=NOW)


@pytest.mark.parametrize("value", [64, "resnet-64"])
def test_small_process_ids_are_not_looked_for(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, process id 64 is as common as a batch size of 64."""
    monkeypatch.setattr(os, "getpid", lambda: 64)
    assert not is_passing(value, now=NOW)


def test_other_time_zone_and_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The day in Greenwich counts, and the day on which the process began."""
    monkeypatch.setattr(changes, "IMPORTED_AT", NOW - 86_400)
    there = datetime.fromtimestamp(NOW, timezone.utc)
    assert is_passing(f"{there:%Y-%m-%d %H:%M}", now=NOW)
    assert is_passing(f"{there - timedelta(days=1):%Y-%m-%d %H:%M}", now=NOW)
    assert not is_passing(f"{there - timedelta(days=2):%Y-%m-%d %H:%M}", now=NOW)
