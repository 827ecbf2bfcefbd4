"""A training that tools start: the first argument names the tool. Its state is in globals of the script, too.

``RECORD`` is the directory of the events. With ``CUT`` (fit, epoch, batch, signal), a fit is cut.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer, seed_everything
from torch import Tensor

from tests.laws.cuts import Cut, Cuts
from tests.laws.events import Events, write_end
from tests.laws.rows import Net, rows_of
from tests.laws.runs import QUIET

SEEN: list[int] = []
DRAWS = random.Random(3)
FITS = {"one": 0.01, "two": 0.02}


class Counting(Net):
    """Changes and uses the script's globals."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        SEEN.append(batch_idx)
        return super().training_step(batch, batch_idx) * (1 + DRAWS.random() + self.hparams.rate * len(SEEN))


def train(name: str) -> float:
    """Train one model."""
    seed_everything(1, verbose=False)
    fit, epoch, batch, signum = (os.environ.get("CUT") or "none 0 0 0").split()
    cut = Cut(at=(int(epoch), int(batch)), by=int(signum)) if fit == name else None
    path = Path(os.environ["RECORD"]) / f"{name}.jsonl"
    settings = {**QUIET, "max_epochs": 2, "logger": False, "enable_checkpointing": False}
    trainer = Trainer(callbacks=[Events(path), Cuts(cut)], **settings)
    trainer.fit(Counting(FITS[name.rpartition("-")[0] or name]), rows_of(24)(), rows_of(8, shuffle=False)())
    write_end(path, trainer, [])
    return float(trainer.callback_metrics["loss"])


def loop() -> None:
    """Train one after the other."""
    for name in FITS:
        train(name)


def train_beside(name: str) -> float:
    """Train one model once another process is to train the other one: a process with both has the globals of both."""
    record = Path(os.environ["RECORD"])
    record.with_name(f"{record.name}-{name}").touch()
    while len(list(record.parent.glob(f"{record.name}-*"))) < len(FITS):
        time.sleep(0.01)
    return train(name)


def pool(context: str) -> None:
    """Train at the same time."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(context)) as executor:
        print(list(executor.map(train_beside, FITS)))


def joblib() -> None:
    """Train in workers of joblib."""
    from joblib import Parallel, delayed  # type: ignore[import-untyped]

    print(Parallel(n_jobs=2)(delayed(train_beside)(name) for name in FITS))


def ray() -> None:
    """Train in tasks of Ray."""
    import ray

    def starts() -> bool:
        try:
            ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["RAY_DIRECTORY"])
        except Exception as error:
            if "timed out during startup" not in str(error):  # after 30 seconds, on a busy machine, too
                raise
            ray.shutdown()
        return ray.is_initialized()

    while not starts():
        pass
    print(ray.get([ray.remote(num_cpus=1, max_retries=0)(train).remote(name) for name in FITS]))


def submitit() -> None:
    """Train in jobs of submitit on this machine."""
    import submitit

    executor = submitit.AutoExecutor(folder="submitit_logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    print([job.result() for job in [executor.submit(train, name) for name in FITS]])


def hydra() -> None:
    """Train with Hydra, in a new output directory at each start."""
    import hydra

    @hydra.main(version_base="1.3", config_path=None)
    def main(config: Any) -> float:
        return train(config.get("name", "one"))

    main()


def optuna() -> None:
    """Do the missing trials of a study; one in which a process has died runs again."""
    import optuna
    from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback

    retry = RetryHeartbeatStaleTrialCallback()
    storage = RDBStorage(
        "sqlite:///study.db", heartbeat_interval=1, grace_period=2, heartbeat_stale_trial_callback=retry
    )
    study = optuna.create_study(
        study_name="two", storage=storage, sampler=optuna.samplers.GridSampler({"fit": [*FITS]}), load_if_exists=True
    )
    num_done = len(study.get_trials(states=[optuna.trial.TrialState.COMPLETE]))
    study.optimize(lambda trial: train(trial.suggest_categorical("fit", [*FITS])), n_trials=2 - num_done)


MAINS: dict[str, Callable[[], object]] = {
    "one": lambda: train("one"), "loop": loop, "fork": lambda: pool("fork"), "spawn": lambda: pool("spawn"),
    "joblib": joblib, "ray": ray, "submitit": submitit, "hydra": hydra, "optuna": optuna,
}  # fmt: skip

if __name__ == "__main__":
    MAINS[sys.argv.pop(1)]()
