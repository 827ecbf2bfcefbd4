"""The fits that the benchmarks measure: Lightning's `BoringModel`, which is the worst case, and a small conv net."""

from __future__ import annotations

import logging
import os
import platform
import time
import warnings
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info
from torchmetrics import MeanMetric, MeanSquaredError

LOGGERS = ("lightning.pytorch", "lightning.fabric", "lightning_faulttolerant")


class TimedModel(BoringModel):
    """`BoringModel` that records when each of its steps begins."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        return super().training_step(batch, batch_idx)


class EvaluatedModel(BoringModel):
    """`BoringModel` that records when each of its evaluation steps begins."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        return super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        return super().test_step(batch, batch_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        return self(batch)


class EvaluatedMetricsModel(EvaluatedModel):
    """A model that logs two metrics at each validation step and over the run."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.error = MeanMetric(), MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        output = self(batch)
        self.mean(self.loss(output))
        self.error(output, torch.ones_like(output))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("error", self.error, on_epoch=True)

    test_step = validation_step


class MetricsModel(TimedModel):
    """A model that logs two metrics at each step and over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.error = MeanMetric(), MeanSquaredError()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.began.append(time.perf_counter())
        output = self(batch)
        loss = self.loss(output)
        self.mean(loss.detach())
        self.error(output.detach(), torch.ones_like(output))
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.log("error", self.error, on_step=True, on_epoch=True)
        return {"loss": loss}


class ChangingModel(TimedModel):
    """A model that changes ten of its attributes at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps, self.average, self.name = 0, 0.0, "0"
        self.last: list[float] = []
        self.recent: deque[int] = deque(maxlen=16)
        self.counts: Counter[int] = Counter()
        self.sums: defaultdict[str, float] = defaultdict(float)
        self.pair = (0, 0.0)
        self.array, self.tensor = np.zeros(8), torch.zeros(8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        self.num_steps += 1
        self.average = 0.9 * self.average + 0.1 * batch_idx
        self.name = str(batch_idx)
        self.last = [self.average, *self.last[:7]]
        self.recent.append(batch_idx)
        self.counts[batch_idx % 4] += 1
        self.sums["all"] += self.average
        self.pair = (batch_idx, self.average)
        self.array += 1
        self.tensor += 1
        return result


class ConvNet(LightningModule):
    """Three convolutions and a linear layer on 32x32 images."""

    def __init__(self) -> None:
        super().__init__()
        self.began: list[float] = []
        layers: list[nn.Module] = []
        for width_in, width_out in ((3, 16), (16, 32), (32, 64)):
            layers += [nn.Conv2d(width_in, width_out, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 10))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.began.append(time.perf_counter())
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class AugmentedImages(Dataset[tuple[Tensor, int]]):
    """Random images of 32x32, each randomly cropped, flipped and changed in brightness."""

    def __init__(self, length: int) -> None:
        self.images = torch.randint(0, 256, (512, 3, 40, 40), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        top, left = torch.randint(0, 9, (2,)).tolist()
        image = self.images[index % len(self.images), :, top : top + 32, left : left + 32].float() / 255
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image * (0.8 + 0.4 * torch.rand(())), index % 10


class BareRandomDataset(RandomDataset):
    """`RandomDataset` of any length in little memory: only its order and its random draws matter here."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__(size, min(length, 1024))
        self.len = length

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index % len(self.data)]


class GrowingDataset(BareRandomDataset):
    """A data set that holds 10,000 small objects and fills a cache."""

    def __init__(self, size: int, length: int) -> None:
        super().__init__(size, length)
        self.annotations = [Annotation(number) for number in range(10_000)]
        self.cache: dict[int, list[float]] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.cache[index] = [float(index)]
        return super().__getitem__(index)


class Annotation:
    """The annotation of one sample."""

    def __init__(self, number: int) -> None:
        self.number, self.boxes = number, [{"left": number, "labels": ["a", "b"]}]


class OwnSampler(Sampler[int]):
    """A sequential sampler that is not torch's, so we don't know when it draws."""

    def __init__(self, dataset: BareRandomDataset) -> None:
        self.length = len(dataset)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


class Stream(IterableDataset[Tensor]):
    """The samples of `BareRandomDataset` in order, each worker with its share. A resume draws them again."""

    def __init__(self, size: int, length: int) -> None:
        self.source = BareRandomDataset(size, length)
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(self.at or first, len(self.source), step):
            self.at = index + step
            yield self.source[index]
        self.at = 0


class StatefulStream(Stream):
    """The same stream with a state, so that it can report its place."""

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.at = state_dict["at"]


def fit(
    model: LightningModule,
    loader: DataLoader[Any],
    callbacks: Sequence[Callback],
    directory: Path,
    *,
    num_ranks: int = 1,
    function: str = "fit",
    checkpoint: Path | None = None,
) -> Trainer:
    """Fit one epoch on the CPU, or evaluate. Use the trainer's defaults, except for files and output.

    Args:
        model: The model.
        loader: The loader of training, or of the evaluation.
        callbacks: The trainer's callbacks.
        directory: Where files go.
        num_ranks: The number of ranks.
        function: ``fit``, ``validate``, ``test``, ``predict``, or ``validation``: a fit of one batch that validates.
        checkpoint: The checkpoint that Lightning restores a fit from.
    """
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=num_ranks,
        strategy="auto" if num_ranks == 1 else "ddp",
        callbacks=list(callbacks),
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if function == "validation":
        trainer.limit_train_batches, trainer.num_sanity_val_steps = 1, 0
        trainer.fit(model, loader, loader)
    else:
        getattr(trainer, function)(model, loader, **({} if checkpoint is None else {"ckpt_path": checkpoint}))
    return trainer


def be_quiet() -> None:
    """Keep Lightning's advice and its reports out of the output."""
    warnings.simplefilter("ignore")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def machine() -> dict[str, str]:
    """Return the description of the machine and software of a measurement."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "system": platform.system(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": lightning.__version__,
        "date": datetime.now(tz=timezone.utc).strftime("%Y-%m-%d"),
        "load": f"{os.getloadavg()[0]:.1f}",
    }
