"""The training that `benchmarks/goodput.py` kills again and again: steps that mostly sleep, and 25 MB that all change.

python benchmarks/goodput_script.py STEPS SECONDS (that a step sleeps) SECONDS (that a start sleeps) [INTERVAL]

With an interval, in steps, it saves by `ModelCheckpoint` and continues from its last checkpoint. Without one, it has
the callback with its default settings. It writes a digest of its final weights, and how long the fit took, to the file
`result`.

It trains once for each line that it reads, in a process that it forks when all is imported, and that sleeps instead for
as long as imports take. So the load of the machine changes little about how long a start takes.
"""

import hashlib
import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

NUM_WORDS, WIDTH, NUM_CLASSES = 2_000, 1024, 16
STEPS_PER_EPOCH = 400


class Words(Dataset[tuple[Tensor, int]]):
    """Eight words and a class, drawn at random for each sample."""

    def __len__(self) -> int:
        return STEPS_PER_EPOCH

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randint(NUM_WORDS, (8,)), index % NUM_CLASSES


class Sleeper(LightningModule):
    """An embedding and a classifier with dropout, trained by Adam: each step changes every tensor of a checkpoint."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.words = nn.Embedding(NUM_WORDS, WIDTH)
        self.classes = nn.Sequential(nn.Dropout(0.2), nn.Linear(WIDTH, NUM_CLASSES))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(self.seconds)
        words, classes = batch
        return nn.functional.cross_entropy(self.classes(self.words(words).mean(1)), classes)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3, fused=True)


def main(num_steps: int, seconds: float, interval: int | None) -> None:
    """Train in the working directory."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    checkpoint = None
    if interval is None:
        from lightning_faulttolerant import FaultTolerance  # the other side must not pay for its import

        callbacks: list[Any] = [FaultTolerance("ours")]  # in place of a ModelCheckpoint
    else:
        callbacks = [ModelCheckpoint("lightnings", every_n_train_steps=interval, save_last=True)]
        checkpoint = "last"
    trainer = Trainer(
        max_steps=num_steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=interval is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    model = Sleeper(seconds)
    began = time.perf_counter()
    trainer.fit(model, DataLoader(Words(), batch_size=1, shuffle=True), ckpt_path=checkpoint)
    took = time.perf_counter() - began
    digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in model.state_dict().values()))
    Path("result").write_text(f"{digest.hexdigest()} {took}")


def start_for_each_line() -> None:
    """Return in a new process for each line of the input. Print its id, and then its exit code."""
    for _ in sys.stdin:
        process_id = os.fork()
        if not process_id:
            output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1), os.dup2(output, 2), os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            return
        print(process_id, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1]), flush=True)
    sys.exit()


if __name__ == "__main__":
    start_for_each_line()
    time.sleep(float(sys.argv[3]))
    main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[4]) if len(sys.argv) > 4 else None)
