"""Randomly drawn data: what reports and errors say of it, what is noted, and for which loaders it is put back."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import Subset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from tests.drawn_data_sets import (
    NUM_SAMPLES,
    Loaders,
    Names,
    Shuffled,
    fit,
    loaders_of,
    of,
    split_at_random,
)
from tests.processes import run
from tests.runs import Net, make_trainer


def again(
    directory: Path,
    make: Callable[[], Loaders],
    *,
    strict: bool = True,
) -> str:
    """Start a script whose data `make` creates, kill it, and start it again with another seed; return its output."""

    def main(start: int) -> None:
        train, validation, *_held = make()
        protection = FaultTolerance(dirpath=directory, every_n_train_steps=1, strict=strict or start == 0)
        faults = [KillAt(3)] if start == 0 else []
        make_trainer([protection, *faults], directory, num_sanity_val_steps=0).fit(Net(), train, validation)

    assert run(lambda: main(0), seed=0).exit_code < 0
    return run(lambda: main(1), seed=1).output


class WithMean(Shuffled):
    """Has a number that depends on its first samples."""

    def __init__(self, num: int = NUM_SAMPLES) -> None:
        super().__init__(num)
        self.mean = sum(self.number(i) for i in range(5)) / 5


def part_without_the_rest() -> Loaders:
    """Return a part of a data set without the parts with the other samples."""
    return loaders_of(Subset(Names(), random.sample(range(36), 20)), Names(8))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (of(WithMean), r"train/0\.dataset\.mean: .*; it may depend on values that were drawn without a seed"),
        (part_without_the_rest, r"train/0\.dataset: .*; not all parts of its split are known"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_anything_else_is_refused(make: Callable[[], Loaders], message: str, tmp_path: Path) -> None:
    """The error shows both values and the remedy; with ``strict=False`` the report shows them."""
    output = again(tmp_path / "strict", make)
    assert re.search(
        rf"FingerprintMismatchError: [\s\S]*- {message}[\s\S]*Call seed_everything before the draw", output
    )
    output = again(tmp_path / "lenient", make, strict=False)
    assert "Resumed NOT EXACTLY" in output
    assert re.search(rf"NOT EXACT {message}", output)


@pytest.mark.parametrize(
    ("seed", "make", "told"),
    [
        (None, split_at_random, "train/0.dataset"),
        (None, of(Shuffled), "train/0.dataset.names"),
        (None, of(Names), None),
        (1, split_at_random, None),
    ],
)
def test_first_start_says_what_has_no_seed(
    seed: int | None,
    make: Callable[[], Loaders],
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line names it and the function to call; there is no line with a seed, or if nothing was drawn."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed() if seed is None else torch.manual_seed(seed)
    with caplog.at_level("INFO"):
        fit(make, [FaultTolerance(dirpath=tmp_path)], tmp_path, max_steps=1)
    lines = [message for message in caplog.messages if "No seed is set" in message]
    assert len(lines) == (told is not None)
    if told is not None:
        assert told in lines[0]
        assert "call seed_everything first" in lines[0]
