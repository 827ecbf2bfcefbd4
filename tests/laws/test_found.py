"""What testers have found: state of scripts that began again without a word."""

from __future__ import annotations

import decimal
import enum
import importlib.util
import random
import re
import signal
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_faulttolerant.cli import main
from tests.laws.cuts import Cut
from tests.laws.rows import Group, Net, Row, Rows, rows_of
from tests.laws.runs import Training, whole_run


class Grows(Dataset[Tensor]):
    """Grows with each epoch."""

    def __init__(self) -> None:
        self.num = 16

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index))


class Growing(Rows):
    """Has a data set that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.labelled = Grows(), list(range(16))

    def train_dataloader(self) -> Any:
        return DataLoader(self.data, 4, shuffle=True)


class Labels(Growing):
    """Has a new subset of its data in each epoch, by a list that grows."""

    def train_dataloader(self) -> Any:
        return DataLoader(Subset(rows_of(24)().dataset, self.labelled), 4, shuffle=True)


class Learns(Net):
    """Lets its data grow."""

    def on_train_epoch_end(self) -> None:
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        data.data.num += 4
        data.labelled += range(4)


class Smaller(Net):
    """Has smaller batches in each epoch."""

    def on_train_epoch_end(self) -> None:
        sampler: Any = self.trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
        sampler.batch_size -= 1


def closing_over(rng: Any) -> type:
    """Return a class whose method draws from a variable around the class."""

    class Draws(Net):
        def loss(self, batch: Tensor) -> Tensor:
            return super().loss(batch) * (1 + rng.random())

    return Draws


class Factor:
    """A descriptor that holds its value."""

    value = 1.0

    def __get__(self, owner: object, kind: Any = None) -> Any:
        return self if owner is None else self.value

    def __set__(self, owner: object, value: float) -> None:
        self.value = value


class Describes(Net):
    """Has a factor that falls."""

    factor = Factor()

    def loss(self, batch: Tensor) -> Tensor:
        self.factor = self.factor * 0.97
        return super().loss(batch) * self.factor


class Weak(Net):
    """Counts by an object that it does not own."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Grows()
        self.counts = weakref.WeakKeyDictionary({self.key: 0})

    def loss(self, batch: Tensor) -> Tensor:
        self.counts[self.key] += 1
        return super().loss(batch) * (1 + 0.01 * self.counts[self.key])


def load_config() -> Any:
    """Load a file by its path, as scripts do with their configuration."""
    path = Path("config.py")
    path.write_text("factor = 1.0")
    spec = importlib.util.spec_from_file_location("config", path)
    assert spec is not None
    assert spec.loader is not None
    config = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(config)
    return config


class Configured(Net):
    """Changes its configuration."""

    def setup(self, stage: str) -> None:
        global configuration
        configuration = load_config()

    def loss(self, batch: Tensor) -> Tensor:
        configuration.factor *= 0.97
        return super().loss(batch) * configuration.factor


configuration: Any = None


Phase: Any = enum.Enum("Phase", "A")
Phase.A.count = 0


class Phased(Net):
    """Counts by a member of an enum, in bytes that it sees through a view, and in a pattern."""

    def __init__(self) -> None:
        super().__init__()
        self.view, self.pattern = memoryview(bytearray(1)), re.compile("a")

    def loss(self, batch: Tensor) -> Tensor:
        Phase.A.count += 1
        self.view[0] += 1
        self.pattern = re.compile(f"{self.pattern.pattern}a")
        return super().loss(batch) * (1 + Phase.A.count / 50) * self.view[0] * len(self.pattern.pattern)


class Sets(Net):
    """Changes settings of the process in its third step, and depends on all of them."""

    def loss(self, batch: Tensor) -> Tensor:
        if self.global_step == 2:
            self.change()
        found = [np.geterr(), torch.get_float32_matmul_precision(), torch.zeros(()).dtype, torch.get_num_threads() == 3,
                 decimal.getcontext().prec, torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
                 torch.backends.cudnn.benchmark, torch.backends.cuda.flash_sdp_enabled()]  # fmt: skip
        return super().loss(batch) * len(str(found))

    def change(self) -> None:
        raise NotImplementedError


class KeepsGraph(Net):
    """Keeps its loss, with what it was computed from."""

    def loss(self, batch: Tensor) -> Tensor:
        self.last = super().loss(batch)
        return self.last


class ReturnsAttributes(Callback):
    """Returns all of its attributes as its state: Lightning has set ``log``, a method of the module, among them."""

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


class OfSetting(Dataset[Tensor]):
    """Returns what the default dtype makes of its rows."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index + 1 / 3, dtype=torch.float64).to(torch.get_default_dtype()).float()


class SetsAfterEpoch(Net):
    """Changes a setting after the first epoch: workers of the next one have it, too."""

    def on_train_epoch_end(self) -> None:
        torch.set_default_dtype(torch.bfloat16)


SETTINGS: dict[str, Callable[[Any], object]] = {
    "the default dtype": lambda _: torch.set_default_dtype(torch.bfloat16),
    "the precision of products": lambda _: torch.set_float32_matmul_precision("high"),
    "deterministic algorithms": lambda _: torch.use_deterministic_algorithms(True),
    "detection of anomalies": lambda _: torch.autograd.set_detect_anomaly(True),
    "flash attention": lambda _: torch.backends.cuda.enable_flash_sdp(False),
    "cuDNN": lambda _: setattr(torch.backends.cudnn, "benchmark", True),
    "the number of threads": lambda _: torch.set_num_threads(3),
    "errors of NumPy": lambda _: np.seterr(divide="ignore"),
    "decimal digits": lambda _: setattr(decimal.getcontext(), "prec", 5),
}


def setting(change: Callable[[Any], object]) -> Callable[[], Row]:
    """Return what makes a row that changes a setting."""
    return lambda: Row(name="sets", module=type("Own", (Sets,), {"change": change}))


EACH_EPOCH = {"reload_dataloaders_every_n_epochs": 1}
FOUND: dict[str, Callable[[], Row]] = {
    "a data set that grows": lambda: Row(name="grows", module=Learns, data=Growing, trainer=EACH_EPOCH),
    "a list that grows": lambda: Row(name="labels", module=Learns, data=Labels, trainer=EACH_EPOCH),
    "smaller batches": lambda: Row(name="smaller", module=Smaller),
    "a generator of NumPy around a class": lambda: Row(name="draws", module=closing_over(np.random.default_rng(2))),
    "a generator of Python around a class": lambda: Row(name="draws", module=closing_over(random.Random(2))),
    "a descriptor": lambda: Row(name="describes", module=Describes),
    "a weak dictionary": lambda: Row(name="weak", module=Weak),
    "a file that importlib has loaded": lambda: Row(name="configured", module=Configured),
    "an enum, a view, and a pattern": lambda: Row(name="phased", module=Phased),
    "a state with a method of the module": lambda: Row(name="keeps", module=KeepsGraph, callbacks=ReturnsAttributes),
    "the default dtype of workers": lambda: Row(
        name="of workers", module=SetsAfterEpoch, train=lambda: DataLoader(OfSetting(), batch_size=4, num_workers=1)
    ),
    **{name: setting(change) for name, change in SETTINGS.items()},
}


@pytest.mark.parametrize("name", FOUND)
def test_found_state_continues(name: str, tmp_path: Path) -> None:
    """A run that is stopped, so that no batch shows a difference, continues as the uninterrupted one."""
    group = Group(rows=(FOUND[name](),))
    whole = whole_run(group, tmp_path / "whole")[0][-1]
    training = Training(group=group, root=tmp_path / "stopped")
    training.start(Cut(at=(1, 2), by=signal.SIGTERM))
    assert training.start().events[0][-1] == whole, training.starts[-1].output


class Added(Callback):
    """Is added in the middle of a training."""


class Adds(Callback):
    """Adds a callback on one rank."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.callbacks += [Added()] if trainer.global_rank else []


def test_callback_that_training_adds_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A new process does not add it, so a resume is refused, with what to do; ``inspect`` names it, too."""
    warns = ("Using `DistributedSampler` with", "It is recommended to use `self.log")
    group = Group(rows=(Row(name="adds", callbacks=Adds, warns=warns),))
    training = Training(group=group, root=tmp_path, num_ranks=2)
    training.start(Cut(at=(1, 2), by=signal.SIGTERM))
    refused = training.start()
    assert refused.codes == [1, 1], refused.output
    assert "callbacks['Added']: a callback that training has added; pass it to the Trainer" in refused.output
    main(["inspect", str(tmp_path)])
    assert capsys.readouterr().out.count("without          callbacks['Added']: a callback that training") == 1
