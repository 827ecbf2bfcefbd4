"""The training that `benchmarks/start.py` starts. It prints when a step begins, and its process ends as if killed.

LAST_BATCH=0 (the batch of that step, or any later one) python benchmarks/start_script.py PARAMETERS (of the model)

With PL_FAULT_TOLERANT_TRAINING=1, it has the callback. With CHECKPOINT=FILE, Lightning continues from that file; if it
does not exist, it is written at that batch.
"""

import os
import sys
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

WIDTH = 16
CHECKPOINT = os.environ.get("CHECKPOINT", "")


class Rows(Dataset[Tensor]):
    """Samples that cost nothing."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index))


class Classifier(LightningModule):
    """A large embedding and a linear layer, trained by Adam."""

    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max(1, num_parameters // WIDTH), WIDTH)
        self.layer = nn.Linear(WIDTH, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx >= int(os.environ["LAST_BATCH"]):
            if CHECKPOINT and not os.path.exists(CHECKPOINT):
                self.trainer.save_checkpoint(CHECKPOINT)
            os.write(1, f"{time.monotonic()} {time.process_time()} {batch_idx}\n".encode())
            os._exit(0)
        return self.layer(self.table(batch[:, 0].long() % self.table.num_embeddings)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    continued = CHECKPOINT if os.path.exists(CHECKPOINT) else None
    loader = DataLoader(Rows(), batch_size=32, shuffle=True)
    trainer.fit(Classifier(int(sys.argv[1])), loader, ckpt_path=continued)
