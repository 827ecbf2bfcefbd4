"""Each field of a ledger changes exactly when the thing that it stands for changes; no earlier field does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.runs import Net, fit_net


class Rows(Dataset[Tensor]):
    """Fixed rows, all shifted by the same amount."""

    def __init__(self, length: int = 16, shift: float = 0.0) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)
        self.shift = shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + self.shift


def ledger_of(directory: Path, *, train: Any = None, seed: int = 1, init: int = 1, **arguments: Any) -> FitLines:
    """Fit the same net on the same rows, except for the given arguments, and return its ledger."""
    path = directory / f"{len(list(directory.iterdir()))}.jsonl"
    torch.manual_seed(init)
    module = arguments.pop("kind", Net)()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    train = DataLoader(Rows(), batch_size=4) if train is None else train
    fit_net(
        [with_ledger(path, directory / "saves", run_id=path.stem)],
        directory,
        module=module,
        train=train,
        validation=DataLoader(Rows(4), batch_size=4),
        **{"max_epochs": 1, **arguments},
    )
    [fit] = read_ledger(path).fits
    return fit


FIELDS = ("order", "content", "rng", "learning_rates", "loss")


class OtherRate(Net):
    """The same net, with another learning rate."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for group in configured["optimizer"].param_groups:
            group["lr"] = 0.5
        return configured


CHANGES: dict[str, tuple[Any, set[str]]] = {
    "none": (dict, set()),
    "order": (
        lambda: {"train": DataLoader(Rows(), batch_size=4, sampler=[3, 1, 2, 0, *range(4, 16)])},
        {"order", "content", "loss"},
    ),
    "augmentation": (lambda: {"train": DataLoader(Rows(shift=0.5), batch_size=4)}, {"content", "loss"}),
    "main-rng": (lambda: {"seed": 2}, {"rng", "loss"}),
    "weights": (lambda: {"init": 2}, {"loss"}),
    "learning-rate": (lambda: {"kind": OtherRate}, {"learning_rates"}),
}


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> FitLines:
    """Return the ledger of an unchanged fit."""
    return ledger_of(tmp_path_factory.mktemp("usual"))


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_tells_what_was_changed(change: str, usual: FitLines, tmp_path: Path) -> None:
    """In the first batch, exactly the fields that the change can affect differ."""
    arguments, fields = CHANGES[change]
    fit = ledger_of(tmp_path, **arguments())
    one, other = usual.of("batch")[0], fit.of("batch")[0]
    assert {name for name in FIELDS if one[name] != other[name]} == fields
    for name in ("weights", "optimizers", "metrics"):
        assert (usual.end[name] == fit.end[name]) == (change == "none")
    assert (usual.end["rng"] == fit.end["rng"]) == (change != "main-rng")
