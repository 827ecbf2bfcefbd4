"""Each field of a ledger changes exactly when the thing that it stands for changes; no earlier field does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.laws.rows import Net
from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.runs import fit_net

ROWS: Any = torch.linspace(-1, 1, 64).reshape(16, 4)


def ledger_of(
    directory: Path, *, rows: Any = ROWS, order: Any = None, seed: int = 1, init: int = 1, kind: type[Net] = Net
) -> FitLines:
    """Fit a net on rows, and return its ledger."""
    path = directory / "ledger.jsonl"
    torch.manual_seed(init)
    module = kind()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    loaders = {"train": DataLoader(rows, batch_size=4, sampler=order), "validation": DataLoader(ROWS[:4], batch_size=4)}
    fit_net([with_ledger(path, directory / "saves")], directory, module=module, max_epochs=1, **loaders)
    [fit] = read_ledger(path)
    return fit


FIELDS = ("order", "content", "rng", "learning_rates", "loss")


class OtherRate(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.5)


CHANGES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "none": ({}, set()),
    "order": ({"order": [3, 1, 2, 0, *range(4, 16)]}, {"order", "content", "loss"}),
    "augmentation": ({"rows": ROWS + 0.5}, {"content", "loss"}),
    "main-rng": ({"seed": 2}, {"rng", "loss"}),
    "weights": ({"init": 2}, {"loss"}),
    "learning-rate": ({"kind": OtherRate}, {"learning_rates"}),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> FitLines:
    """Return the ledger of an unchanged fit."""
    return ledger_of(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_tells_what_was_changed(change: str, usual: FitLines, tmp_path: Path) -> None:
    """In the first batch, exactly the fields that the change can affect differ."""
    arguments, fields = CHANGES[change]
    fit = ledger_of(tmp_path, **arguments)
    one, other = usual.of("batch")[0], fit.of("batch")[0]
    assert {name for name in FIELDS if one[name] != other[name]} == fields
    for name in ("weights", "optimizers", "metrics"):
        assert (usual.end[name] == fit.end[name]) == (change == "none")
    assert (usual.end["rng"] == fit.end["rng"]) == (change != "main-rng")
