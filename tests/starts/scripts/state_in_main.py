"""Train with state of the script itself: ``state_in_main.py here|submitit|joblib|ray``."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, loader
from torch import Tensor


class Tracker:
    """Sums values."""

    def __init__(self) -> None:
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.total += value


SEEN: list[int] = []
TRACKERS: list[Tracker] = []
DRAWS = random.Random(3)
NUM_STEPS = 0


class Counting(Net):
    """Records in the script's globals what it does."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        global NUM_STEPS
        loss = super().training_step(batch, batch_idx) * (1 + DRAWS.random())
        SEEN.append(batch_idx)
        NUM_STEPS += 1
        if batch_idx == 0:
            TRACKERS.append(Tracker())
        TRACKERS[-1].add(loss.item())
        return loss


def train(name: str) -> list[Any]:
    """Train one model."""
    seed_everything(1)
    model = Counting(hidden=8 if name == "fit" else 4)  # jobs that are alike may exchange their runs
    trainer = Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[Interrupt(name)]
    )
    trainer.fit(model, loader())
    kept = [SEEN, NUM_STEPS, [tracker.total for tracker in TRACKERS], DRAWS.random()]
    finished(name, model, kept=kept)
    return kept


def main(where: str) -> list[Any]:
    """Train here, or in a job."""
    if where == "submitit":
        import submitit

        executor = submitit.AutoExecutor(folder="submitit_logs", cluster="local")
        executor.update_parameters(timeout_min=5)
        return executor.submit(train, "fit").result()
    if where == "joblib":
        from joblib import Parallel, delayed  # type: ignore[import-untyped]

        return Parallel(n_jobs=2)(delayed(train)(name) for name in ["fit", "other"])[0]
    if where == "ray":
        import ray

        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ.get("RAY_DIRECTORY"))
        return ray.get(ray.remote(num_cpus=1, max_retries=0)(train).remote("fit"))
    return train("fit")


if __name__ == "__main__":
    print("kept", main(sys.argv[1]))
