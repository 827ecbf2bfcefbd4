"""The training script of `train.sbatch`: it trains on handwritten digits, with as many tasks as SLURM starts.

    sbatch train.sbatch

When the job's time is over, the job saves and requeues itself. The last line of its log is a digest of the trained
weights. It equals that of a job with enough time.
"""

import hashlib
import os
import signal

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import SLURMEnvironment
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_faulttolerant import FaultTolerance


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.layers(images), labels)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    seed_everything(1)
    images, labels = load_digits(return_X_y=True)
    digits = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    trainer = Trainer(
        max_epochs=40,
        num_nodes=int(os.environ["SLURM_NNODES"]),
        devices=int(os.environ["SLURM_NTASKS_PER_NODE"]),
        strategy="ddp",
        plugins=[SLURMEnvironment(requeue_signal=signal.SIGUSR1)],
        callbacks=[FaultTolerance(os.environ["RUN_DIRECTORY"], grace_seconds=100)],
        enable_progress_bar=False,
    )
    model = DigitNet()
    trainer.fit(model, DataLoader(digits, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        weights = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
        print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")
