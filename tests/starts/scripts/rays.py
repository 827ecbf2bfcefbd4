"""Train two models at the same time, in Ray tasks."""

import os

import ray
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import SavingNet, loader

RATES = [0.1, 0.2]


@ray.remote(num_cpus=1, max_retries=0)
def train(lr: float) -> float:
    """Train one model."""
    seed_everything(1)
    model = SavingNet(lr)
    name = f"lr={lr}"
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Interrupt(name)]
    )
    trainer.fit(model, loader())
    finished(name, model)
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ.get("RAY_DIRECTORY"))
    print("losses", ray.get([train.remote(lr) for lr in RATES]))
