"""Each field of a ledger changes exactly when the thing that it stands for changes; no earlier field does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_faulttolerant.trainer.steps.digests import digest
from tests.data_sets import Unsized
from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.runs import Fetches, Net, TwoLoaders, fit_net


class Rows(Dataset[Tensor]):
    """Fixed rows, all shifted by the same amount."""

    def __init__(self, length: int = 16, shift: float = 0.0) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)
        self.shift = shift

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index] + self.shift


class Fixed(Sampler[int]):
    """Yields these indices."""

    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


def ledger_of(directory: Path, *, train: Any = None, seed: int = 1, init: int = 1, **arguments: Any) -> FitLines:
    """Fit the same net on the same rows, except for the given arguments, and return its ledger."""
    path = directory / f"{len(list(directory.iterdir()))}.jsonl"
    module = arguments.pop("module", None)
    if module is None:
        torch.manual_seed(init)
        module = Net()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    train = DataLoader(Rows(), batch_size=4) if train is None else train
    validation = arguments.pop("validation", DataLoader(Rows(4), batch_size=4))
    fit_net(
        [with_ledger(path, directory / "saves", run_id=path.stem)],
        directory,
        module=module,
        train=train,
        validation=validation,
        **{"max_epochs": 1, **arguments},
    )
    [fit] = read_ledger(path).fits
    return fit


FIELDS = ("order", "content", "rng", "learning_rates", "loss")


def other_learning_rate() -> LightningModule:
    """Return the same net, with another learning rate."""
    torch.manual_seed(1)
    module = Net()
    configure = module.configure_optimizers
    module.configure_optimizers = lambda: _with_rate(configure(), 0.5)  # type: ignore[method-assign]
    return module


def _with_rate(configured: dict[str, Any], rate: float) -> dict[str, Any]:
    for group in configured["optimizer"].param_groups:
        group["lr"] = rate
    return configured


CHANGES: dict[str, tuple[Any, set[str]]] = {
    "none": (dict, set()),
    "order": (
        lambda: {"train": DataLoader(Rows(), batch_size=4, sampler=Fixed([3, 1, 2, 0, *range(4, 16)]))},
        {"order", "content", "loss"},
    ),
    "augmentation": (lambda: {"train": DataLoader(Rows(shift=0.5), batch_size=4)}, {"content", "loss"}),
    "main-rng": (lambda: {"seed": 2}, {"rng", "loss"}),
    "weights": (lambda: {"init": 2}, {"loss"}),
    "learning-rate": (lambda: {"module": other_learning_rate()}, {"learning_rates"}),
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
    ends = [line.end for line in (usual, fit)]
    assert ends[0] is not None
    assert ends[1] is not None
    assert (ends[0]["weights"] == ends[1]["weights"]) == (change == "none")
    assert (ends[0]["optimizers"] == ends[1]["optimizers"]) == (change == "none")
    assert (ends[0]["rng"] == ends[1]["rng"]) == (change != "main-rng")
    assert (ends[0]["metrics"] == ends[1]["metrics"]) == (change == "none")


def test_logged_values_are_what_loggers_would_get(usual: FitLines) -> None:
    """Without a logger too, it holds the values of each batch, of the validation run, and of the epoch."""
    logs = usual.of("log")
    names = [sorted(line["metrics"].keys() - {"epoch"}) for line in logs]
    assert names == [*[["loss_step"]] * 4, ["val_loss"], ["loss_epoch"]]
    assert [line["step"] for line in logs] == [0, 1, 2, 3, 3, 3]
    assert [line["validating"] for line in logs] == [False] * 4 + [True, False]
    assert [line["epoch_end"] for line in logs] == [False] * 5 + [True]
    assert [(line["epoch"], line["batch"]) for line in logs] == [(0, number) for number in (1, 2, 3, 4, 4, 4)]
    losses = [line["loss"] for line in usual.of("batch")]
    assert [line["metrics"]["loss_step"] for line in logs[:4]] == losses


# The order of samples, for loaders of each kind.


def orders_of(fit: FitLines) -> list[str | None]:
    """Return the order of each batch."""
    return [line["order"] for line in fit.of("batch")]


def dealt(*indices: dict[str, list[int]]) -> list[str]:
    """Return the orders of batches whose loaders yielded these indices."""
    return [digest(parts) for parts in indices]


ORDERS: dict[str, tuple[Any, list[str] | None]] = {
    "no-workers": (
        lambda: {"train": DataLoader(Rows(8), batch_size=4)},
        dealt({"train/0": [0, 1, 2, 3]}, {"train/0": [4, 5, 6, 7]}),
    ),
    "two-workers": (
        lambda: {"train": DataLoader(Rows(8), batch_size=4, num_workers=2)},
        dealt({"train/0": [0, 1, 2, 3]}, {"train/0": [4, 5, 6, 7]}),
    ),
    "fetched-ahead": (
        lambda: {"train": Unsized(Rows(8), batch_size=4)},
        dealt({"train/0": [0, 1, 2, 3]}, {"train/0": [4, 5, 6, 7]}),
    ),
    "cycled": (
        lambda: {
            "module": TwoLoaders(),
            "train": {"a": DataLoader(Rows(12), batch_size=4), "b": DataLoader(Rows(8), batch_size=4)},
        },
        dealt(
            {"train/0": [0, 1, 2, 3], "train/1": [0, 1, 2, 3]},
            {"train/0": [4, 5, 6, 7], "train/1": [4, 5, 6, 7]},
            {"train/0": [8, 9, 10, 11], "train/1": [0, 1, 2, 3]},
        ),
    ),
    "step-fetches": (
        lambda: {"module": Fetches(2), "train": DataLoader(Rows(16), batch_size=4), "limit_val_batches": 0},
        [
            digest([digest({"train/0": [0, 1, 2, 3]}), digest({"train/0": [4, 5, 6, 7]})]),
            digest([digest({"train/0": [8, 9, 10, 11]}), digest({"train/0": [12, 13, 14, 15]})]),
        ],
    ),
    "without-batching": (
        lambda: {"train": DataLoader([torch.zeros(2, 4), torch.ones(2, 4)], batch_size=None)},
        [digest({"train/0": 0}), digest({"train/0": 1})],
    ),
}


@pytest.mark.filterwarnings("ignore:.*dataloader_iter", "ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", ORDERS)
def test_order_is_the_indices_of_the_batch(kind: str, tmp_path: Path) -> None:
    """It is the digest of the indices that each loader's sampler yielded for the trained batch."""
    arguments, expected = ORDERS[kind]
    assert orders_of(ledger_of(tmp_path, **arguments())) == expected
