"""Train in separate processes, one after the other."""

import multiprocessing
import sys

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, loader


def train(lr: float) -> None:
    """Train one model."""
    seed_everything(1)
    model = Net(lr)
    name = f"lr={lr}"
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt(name)])
    trainer.fit(model, loader())
    finished(name, model)


if __name__ == "__main__":
    for rate in map(float, sys.argv[1:]):
        process = multiprocessing.get_context("spawn").Process(target=train, args=(rate,))
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"training with {rate} failed: {process.exitcode}")
