"""Train two models at the same time, in the processes of a pool: ``pool.py joblib|spawn|fork``."""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from interrupt import Interrupt, finished
from joblib import Parallel, delayed  # type: ignore[import-untyped]
from lightning.pytorch import Trainer, seed_everything
from tiny import SavingNet, loader

RATES = [0.1, 0.2]


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
    if sys.argv[1] == "joblib":
        losses = Parallel(n_jobs=2)(delayed(train)(lr) for lr in RATES)
    else:
        with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(sys.argv[1])) as pool:
            losses = list(pool.map(train, RATES))
    print("losses", losses)
