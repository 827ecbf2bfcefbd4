"""Train on handwritten digits with any number of processes: begin with two, kill them, and continue with one.

    torchrun --standalone --nproc-per-node=2 train.py    # interrupt it with Ctrl-C, or kill it
    torchrun --standalone --nproc-per-node=1 train.py    # continues in the middle of the epoch

Each image of the epoch is used once, on any rank, and gets the same noise: `worker_rng="per_sample"` seeds the noise by
the image's place in the epoch. Each epoch ends with a line that reports this. With a constant global batch size, each
step has the same images, too.
"""

import os

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import SumMetric

from lightning_faulttolerant import FaultTolerance

NUM_IMAGES = 1792
GLOBAL_BATCH_SIZE = 32


class NoisyDigits(Dataset):
    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.images[index] + 0.1 * torch.randn(64), self.labels[index], index


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        self.count, self.indices = SumMetric(), SumMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels, indices = batch
        self.count.update(len(indices))
        self.indices.update(indices.sum())
        return nn.functional.cross_entropy(self.layers(images), labels)

    def on_train_epoch_end(self) -> None:
        count, indices = int(self.count.compute()), int(self.indices.compute())  # summed over all ranks
        is_each_once = (count, indices) == (NUM_IMAGES, sum(range(NUM_IMAGES)))
        if self.trainer.is_global_zero:
            print(f"epoch {self.current_epoch}: {count} images, each once: {is_each_once}")
        self.count.reset(), self.indices.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    seed_everything(1)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))  # the number that torchrun started
    callback = FaultTolerance(worker_rng="per_sample", every_n_train_steps=10)
    trainer = Trainer(max_epochs=8, accelerator="cpu", strategy="ddp", devices=num_ranks, callbacks=[callback])
    batch_size = GLOBAL_BATCH_SIZE // num_ranks
    trainer.fit(DigitNet(), DataLoader(NoisyDigits(), batch_size=batch_size, shuffle=True))
