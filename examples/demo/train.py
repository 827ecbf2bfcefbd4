"""Train a small network on handwritten digits: an ordinary Lightning script that two lines make fault tolerant.

The two lines are marked (1) and (2). The lines marked (demo) record what happens, so that run.py can compare runs.
"""

import argparse
import os
import random
from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_faulttolerant import FaultTolerance  # (1)
from lightning_faulttolerant.trainer.recorder import Recorder, record_end  # (demo)


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images that are randomly shifted, brightened and made noisy, drawing once from each of the three generators."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        shift = (random.randint(-1, 1), random.randint(-1, 1))
        image = self.images[index].roll(shift, dims=(1, 2)) * np.random.uniform(0.7, 1.3)
        return image + 0.1 * torch.randn(image.shape), self.labels[index]


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        second = nn.Sequential(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.layers = nn.Sequential(first, second, nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores, labels = self.layers(batch[0]), batch[1]
        self.log("val_loss", cross_entropy(scores, labels))
        self.log("val_accuracy", (scores.argmax(dim=1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main(root: Path) -> None:
    torch.set_num_threads(1)  # the last bits of a sum depend on the number of threads: keep it constant
    seed_everything(int(os.environ.get("DEMO_SEED", "1")))  # another seed in each restart: a resume works with any
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    train = DataLoader(Augmented(images[:1500], labels[:1500]), batch_size=32, shuffle=True, num_workers=2)
    validation = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=99)

    root.mkdir(parents=True, exist_ok=True)
    recorder = Recorder(root / "trace.jsonl")  # (demo)
    callbacks = [FaultTolerance(every_n_train_steps=10), recorder]  # (2)
    trainer = Trainer(callbacks=callbacks, accelerator="cpu", max_epochs=10, log_every_n_steps=1, default_root_dir=root)
    trainer.fit(DigitNet(), train, validation)
    draws = {"python": random.random(), "numpy": np.random.rand(), "torch": torch.rand(()).item()}  # (demo)
    record_end(recorder, trainer, draws)  # (demo)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True, help="directory of everything that the run writes")
    main(parser.parse_args().output)
