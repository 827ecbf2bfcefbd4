"""Train in submitit jobs, as cluster.py does: another script with the same fits."""

import sys

import submitit
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, loader


def train(lr: float) -> float:
    """Train one model."""
    seed_everything(1)
    model = Net(lr)
    name = f"lr={lr}"
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Interrupt(name)]
    )
    trainer.fit(model, loader())
    finished(name, model)
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="submitit_logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    jobs = [executor.submit(train, lr) for lr in map(float, sys.argv[1:])]
    for job in jobs:
        print("job", job.job_id, "loss", job.result())
