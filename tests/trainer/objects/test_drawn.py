"""Data that are drawn at random before ``fit``: what errors and the first start say of them."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from tests.laws.features.drawn_data import Names, number_in
from tests.processes import run
from tests.runs import fit_net


class Shuffled(Names):
    """Shuffles the names."""

    def __init__(self) -> None:
        super().__init__(20)
        random.shuffle(self.names)


class WithFirst(Shuffled):
    """Has a number that depends on the order."""

    def __init__(self) -> None:
        super().__init__()
        self.first = number_in(self.names[0])


def part_without_the_rest() -> Any:
    """Return a part of a data set without the parts with the other samples."""
    return Subset(Names(36), random.sample(range(36), 20))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (WithFirst, r"train/0\.dataset\.first: .*; it may depend on values that were drawn without a seed"),
        (part_without_the_rest, r"train/0\.dataset: .*; not all parts of its split are known"),
    ],
)
def test_what_can_not_be_put_back_is_refused(make: Callable[[], Any], message: str, tmp_path: Path) -> None:
    """The error shows both values and the remedy."""

    def main(*faults: KillAt) -> None:
        protection = FaultTolerance(dirpath=tmp_path, every_n_train_steps=1)
        fit_net([protection, *faults], tmp_path, train=DataLoader(make(), 4, shuffle=True), max_epochs=1)

    assert run(lambda: main(KillAt(3)), seed=0).exit_code < 0
    expected = rf"FingerprintMismatchError: [\s\S]*- {message}[\s\S]*Call seed_everything before the draw"
    assert re.search(expected, run(main, seed=1).output)


@pytest.mark.parametrize(
    ("seed", "make", "told"),
    [
        (None, part_without_the_rest, "train/0.dataset"),
        (None, Shuffled, "train/0.dataset.names"),
        (None, lambda: Names(20), None),
        (1, Shuffled, None),
    ],
)
def test_first_start_says_what_has_no_seed(
    seed: int | None,
    make: Callable[[], Any],
    told: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One line names it and the function to call; there is no line with a seed, or if nothing was drawn."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.seed() if seed is None else torch.manual_seed(seed)
    with caplog.at_level("INFO"):
        fit_net([FaultTolerance(dirpath=tmp_path)], tmp_path, train=DataLoader(make(), 4, shuffle=True), max_steps=1)
    lines = [message for message in caplog.messages if "No seed is set" in message]
    assert len(lines) == (told is not None)
    assert all(f"{told}" in line and "call seed_everything first" in line for line in lines)
