"""Read the data of this checkout, and write to a directory that all checkouts share."""

import json
import os
from pathlib import Path

import torch
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SEED = 1


class Rows(Dataset[Tensor]):
    """The content of the file, with noise."""

    def __init__(self, path: Path) -> None:
        self.rows: list[float] = json.loads(path.read_text())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        noise = 0.1 * torch.randn(4)
        return noise + self.rows[index]


seed_everything(SEED)
data = Rows(Path(__file__).with_name("data.json"))
model = Net()
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    default_root_dir=os.environ["OUTPUT_ROOT"],
    callbacks=[Interrupt()],
)
trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True))
finished("fit", model)
