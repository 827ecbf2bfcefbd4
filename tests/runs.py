"""Small data sets, models and fits that the tests of the law share: everything in them draws random numbers."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from lightning_faulttolerant.testing import Interruption, assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt


class NoisyDataset(Dataset[Tensor]):
    """Fixed rows, with noise from all three global generators, their cached Gaussians included."""

    def __init__(self, length: int = 32) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        noise = random.gauss(0, 1) + float(np.random.randn()) + float(torch.randn(()))
        return self.rows[index] + 0.1 * noise


class HoldingDataset(NoisyDataset):
    """Draws from generators of its own, too."""

    def __init__(self, length: int = 32) -> None:
        super().__init__(length)
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.legacy = np.random.RandomState(0)
        self.torch = torch.Generator().manual_seed(0)

    def __getitem__(self, index: int) -> Tensor:
        own = self.python.gauss(0, 1) + self.numpy.normal() + self.legacy.randn()
        return super().__getitem__(index) + 0.1 * float(own) + 0.1 * torch.randn((), generator=self.torch)


class Net(LightningModule):
    """Dropout, batch norm, Adam, a scheduler per step; logs its loss per step and per epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.layers(batch).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_trainer(callbacks: list[Callback], directory: Path, **arguments: Any) -> Trainer:
    """Return a quiet CPU trainer that logs at every step; 2 epochs unless said otherwise."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": directory,
    }
    return Trainer(callbacks=callbacks, **{**defaults, **arguments})


def fit_net(
    callbacks: list[Callback],
    directory: Path,
    *,
    train: Any = None,
    validation: Any = None,
    module: LightningModule | None = None,
    ckpt_path: Any = None,
    **arguments: Any,
) -> Trainer:
    """Fit `Net`, or `module`, on shuffled noisy data, 8 batches an epoch, unless other loaders are given."""
    trainer = make_trainer(callbacks, directory, **arguments)
    train = DataLoader(NoisyDataset(), batch_size=4, shuffle=True) if train is None else train
    validation = DataLoader(NoisyDataset(8), batch_size=4) if validation is None else validation
    trainer.fit(Net() if module is None else module, train, validation, ckpt_path=ckpt_path)
    return trainer


class TwoLoaders(Net):
    """Is trained on a long and a short loader at once."""

    def training_step(self, batch: dict[str, Tensor | None], batch_idx: int) -> Tensor:
        return super().training_step(torch.cat([part for part in batch.values() if part is not None]), batch_idx)


class Fetches(Net):
    """Takes its batches from the iterator itself, `num_fetches` a step."""

    def __init__(self, num_fetches: int = 1) -> None:
        super().__init__()
        self.num_fetches = num_fetches

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:
        fetched = [next(dataloader_iter) for _ in range(self.num_fetches)]
        loss = torch.stack([self.layers(batch).square().mean() for batch, _, _ in fetched]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("index", float(fetched[-1][1]), batch_size=4)
        return loss


class Unsized(DataLoader[Any]):
    """Has no length: Lightning fetches one batch ahead."""

    def __len__(self) -> int:
        raise TypeError("no length")


# Where runs are cut. An epoch has 8 batches unless said otherwise.


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """A kill at the start of batch `kill` (counted over all epochs) of a run that saves every `every` steps."""

    kill: int
    every: int
    goes_on_at: tuple[int, int]


FIRST_EPOCH = Cut(kill=3, every=1, goes_on_at=(0, 3))
LATER_EPOCH = Cut(kill=14, every=13, goes_on_at=(1, 5))

each_cut = pytest.mark.parametrize(
    "cut", [pytest.param(FIRST_EPOCH, id="first-epoch"), pytest.param(LATER_EPOCH, id="later-epoch")]
)
each_num_workers = pytest.mark.parametrize("num_workers", [0, 2])


def assert_goes_on(
    cut: Cut,
    *,
    train: Callable[[], Any] | None = None,
    validation: Callable[[], Any] | None = None,
    module: Callable[[], LightningModule] = Net,
    users: Callable[[], list[Callback]] = list,
    **arguments: Any,
) -> None:
    """Hold a fit of what the callables make to the law, killed at `cut`; `arguments` are the Trainer's."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(
            [*users(), *callbacks],
            directory,
            train=train and train(),
            validation=validation and validation(),
            module=module(),
            **arguments,
        )

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *cut.goes_on_at)


def assert_exact(
    users: Callable[[], list[Callback]],
    *faults: Any,
    module: Callable[[], LightningModule] = Net,
    options: dict[str, Any] = {"every_n_train_steps": 1},  # noqa: B006 - it is only read
    **arguments: Any,
) -> list[Interruption]:
    """Hold a fit with the callbacks that `users` makes to the law."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net([*users(), *callbacks], directory, module=module(), **arguments)

    return assert_resumes_exactly(fit, faults, options=options)


class RaiseAt(Callback):
    """Raises in a hook of an epoch; stands behind the callbacks of the run."""

    def __init__(self, hook: str, epoch: int) -> None:
        self.hook = hook
        self.epoch = epoch

    def strike(self, hook: str, trainer: Trainer) -> None:
        if (hook, trainer.current_epoch) == (self.hook, self.epoch) and not trainer.sanity_checking:
            raise ZeroDivisionError(f"in {hook}")

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        self.strike("on_train_epoch_start", trainer)

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        self.strike("on_train_epoch_end", trainer)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.strike("on_validation_batch_end", trainer)

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.strike("on_validation_end", trainer)


# Data sets, samplers and functions of loaders: at the top of the module, so that a spawned worker can have them.


class BatchesDataset(NoisyDataset):
    """Each of its 8 items is a whole batch."""

    def __init__(self) -> None:
        super().__init__(8)

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([super(BatchesDataset, self).__getitem__(index) for _ in range(4)])


class ManyAtOnceDataset(NoisyDataset):
    """Gives all samples of a batch at once, with a noise that they share."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        shared = float(np.random.randn())
        return [self[index] + shared for index in indices]


class LazyDataset(NoisyDataset):
    """Makes its generator when it is first used; until then its attribute is ``None``, or missing."""

    def __init__(self, *, has_attribute: bool) -> None:
        super().__init__()
        if has_attribute:
            self.rng = None

    def __getitem__(self, index: int) -> Tensor:
        if getattr(self, "rng", None) is None:
            self.rng = np.random.default_rng(0)
        return super().__getitem__(index) + self.rng.normal()


class Jitter:
    """A transform that draws from a generator which it was given."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: Tensor) -> Tensor:
        if isinstance(self.rng, torch.Generator):
            return value + torch.randn((), generator=self.rng)
        return value + float(self.rng.normal() if hasattr(self.rng, "normal") else self.rng.gauss(0, 1))


class Compose:
    """Transforms one after the other."""

    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)

    def __call__(self, value: Any) -> Any:
        for transform in self.transforms:
            value = transform(value)
        return value


class TransformedDataset(NoisyDataset):
    """Has a transform in which each kind of generator hides."""

    def __init__(self) -> None:
        super().__init__()
        inner = Compose(Jitter(np.random.RandomState(0)), Jitter(torch.Generator().manual_seed(0)))
        self.transform = Compose(Jitter(random.Random(0)), {"inner": inner}["inner"], Jitter(np.random.default_rng(0)))

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(super().__getitem__(index))


class PythonShuffle(Sampler[int]):
    """Shuffles with Python's global generator, or with one of its own."""

    def __init__(self, length: int = 32, rng: random.Random | None = None) -> None:
        self.length = length
        self.rng = rng

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.length))
        (self.rng or random).shuffle(order)
        return iter(order)


class DrawingSampler(PythonShuffle):
    """Draws from torch's global generator at every index."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.length):
            yield int(torch.randint(self.length, ()))


class CountingSampler(PythonShuffle):
    """Has a hidden state: the order depends on how often it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.started = 0

    def __iter__(self) -> Iterator[int]:
        self.started += 1
        return iter([(index * 5 + self.started) % self.length for index in range(self.length)])


class UnsizedSampler(PythonShuffle):
    """Does not know how many indices it gives."""

    def __len__(self) -> int:
        raise TypeError("no length")


class RaggedBatches(Sampler[list[int]]):
    """A batch sampler: 8 batches of 2 to 5 samples, permuted by NumPy's global generator."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.permutation(32).tolist()
        for size in (4, 2, 5, 3, 4, 5, 2, 4):
            yield order[:size]
            order = order[size:]


class Squares(IterableDataset[Tensor]):
    """An iterable data set."""

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(i)) for i in range(32))


class NoisyCollate:
    """A ``collate_fn`` that draws, from the global generators and from one of its own."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + self.rng.gauss(0, 1) + float(np.random.randn()) + torch.randn(())


def closed_over_collate() -> Callable[[list[Tensor]], Tensor]:
    """Return a ``collate_fn`` that draws from a generator in its closure."""
    rng = np.random.default_rng(0)
    return lambda samples: torch.stack(samples) + rng.normal()


def drawing_worker_init(worker_id: int) -> None:
    """Seed NumPy as tutorials say, draw, and leave what was drawn in the worker's copy of the data set."""
    np.random.seed((torch.initial_seed() + worker_id) % 2**32)
    info = get_worker_info()
    assert info is not None
    info.dataset.rows = info.dataset.rows + random.random() + float(np.random.rand()) + torch.rand(())


class UnpackingLoader(DataLoader[Any]):
    """Its ``__iter__`` is a generator that takes the batches apart, and draws."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            first, *others = batch
            yield torch.stack([first + torch.randn(()), *others])


class MappingLoader(DataLoader[Any]):
    """Its ``__iter__`` is a plain function that returns an iterator, which draws."""

    def __iter__(self) -> Iterator[Any]:
        return map(Jitter(random), super().__iter__())
