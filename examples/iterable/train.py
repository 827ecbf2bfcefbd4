"""Train on a stream of handwritten digits without indices. Kill it and run it again: it ends with the same line.

    python train.py

The data set is a plain `IterableDataset`. Two workers share it; each shuffles in a buffer and adds noise. The data set
has no `state_dict`. On a resume, the workers draw the consumed samples again without handing them over, and continue
with the generators as they were. A data set with `state_dict` and `load_state_dict` provides its state instead, and
nothing is drawn twice.
"""

import hashlib
import random
from collections.abc import Iterator

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_faulttolerant import FaultTolerance

BUFFER_SIZE = 200


class DigitStream(IterableDataset):
    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        buffer: list[int] = []
        for index in range(worker.id, len(self.labels), worker.num_workers):
            buffer.append(index)
            if len(buffer) == BUFFER_SIZE:
                yield self.noisy(buffer.pop(random.randrange(BUFFER_SIZE)))
        random.shuffle(buffer)
        yield from map(self.noisy, buffer)

    def noisy(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index] + 0.1 * torch.randn(64), self.labels[index]


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    seed_everything(1)
    trainer = Trainer(max_epochs=20, accelerator="cpu", callbacks=[FaultTolerance()])
    model = DigitNet()
    trainer.fit(model, DataLoader(DigitStream(), batch_size=32, num_workers=2))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
