"""The start of a fit: the values that distinguish it from other fits, and the values that may change at each start."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_faulttolerant.trainer.identity import fingerprint
from lightning_faulttolerant.trainer.identity.fingerprint import StartFingerprint
from tests.runs import Net, make_trainer


class Given(Net):
    """Has hyperparameters and attributes."""

    def __init__(self, hyperparameters: dict[str, Any] | None = None, **attributes: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hyperparameters or {})
        vars(self).update(attributes)


def rows(number: int = 8, first: float = 0.0) -> DataLoader[Any]:
    """Return a loader."""
    return DataLoader(TensorDataset(torch.full((number, 4), first)), batch_size=4)


def started(module: LightningModule, data: Any = None, *, seed: int = 1, **how: Any) -> StartFingerprint:
    """Return the start of a fit of a module that has just been created."""
    found: list[StartFingerprint] = []

    def run(trainer: Trainer, *_: Any, **__: Any) -> None:
        found.append(fingerprint.start_fingerprint(trainer, **how))
        raise KeyboardInterrupt

    torch.manual_seed(seed)
    for parameter in module.parameters():
        torch.nn.init.uniform_(parameter)
    trainer = make_trainer([], Path("unused"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_run", run)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.fit(module, **({"datamodule": data} if isinstance(data, LightningDataModule) else
                                   {"train_dataloaders": rows() if data is None else data}))  # fmt: skip
    return found[0]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"lr": 0.1}, {"lr": 0.2}),
        ({"hyperparameters": {"lr": 0.1}}, {"hyperparameters": {"lr": 0.2}}),
        ({"hyperparameters": {"o": {"lr": 0.1}}}, {"hyperparameters": {"o": {"lr": 0.2}}}),
        ({"hyperparameters": {"sizes": [1, 2]}}, {"hyperparameters": {"sizes": [1, 3]}}),
        ({"flag": True}, {"flag": False}),
        ({"hyperparameters": {"loss": "mse"}}, {"hyperparameters": {"loss": "l1"}}),
        ({"lr": float("nan")}, {"lr": 0.1}),
    ],
)
def test_numbers_tell_fits_apart(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Numbers among hyperparameters and attributes distinguish fits."""
    assert not started(Given(**one)).has_core(started(Given(**other)).state_dict())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "a"}, {"name": "b"}),
        ({"hyperparameters": {"name": f"run-{datetime.now():%Y-%m-%d_%H-%M}"}}, {"hyperparameters": {}}),
        ({"began": time.time()}, {"began": time.time() - 3600}),
        ({"began": int(time.time() * 1e9)}, {"began": int(time.time() * 1e9) - 5}),
        ({"pid": 31_337}, {}),
        ({"_calls": 1}, {"_calls": 2}),
    ],
)
def test_what_may_differ(one: dict[str, Any], other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts among attributes, the time, the process id, and private attributes don't count."""
    monkeypatch.setattr(os, "getpid", lambda: 31_337)  # a small one, as a container has, may be any number
    assert started(Given(**one)).has_core(started(Given(**other)).state_dict())


def test_accepted_hyperparameters() -> None:
    """Hyperparameters that the user has accepted may differ, at this start or at an earlier one."""
    one, other = ({"hyperparameters": {"start": value, "o": {"at": value}}} for value in (1.5, 2.5))
    how = {"accepted": ("hyperparameters.start", "hyperparameters.o")}
    assert started(Given(**one), **how).has_core(started(Given(**other)).state_dict())
    assert started(Given(**one)).has_core(started(Given(**other), **how).state_dict())
    again = started(Given(**one), **how).continuing(started(Given(**other)).state_dict())
    assert started(Given(**one)).has_core(again)
    assert not started(Given(**one)).has_core(started(Given(**other)).state_dict())


def test_data() -> None:
    """Loaders that are passed to `fit` count, also nested ones."""
    assert started(Given(), rows()).has_data(started(Given(), rows()).state_dict())
    assert not started(Given(), rows()).has_data(started(Given(), rows(first=1.0)).state_dict())
    nested = started(Given(), {"a": [rows(), rows(4)]})
    assert sorted(nested.data) == ["train.a.0", "train.a.1"]
