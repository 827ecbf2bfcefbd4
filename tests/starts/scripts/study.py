"""An Optuna study in a file: started again, it does the missing trials.

``study.py [--hyperparameters] [--seed] [--retry]``: with hyperparameters in the checkpoints, with a fixed seed for
weights, data, and sampler, and with trials that run again if a process has died in them.
"""

import argparse

import optuna
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from optuna.storages import RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.trial import Trial, TrialState
from tiny import Net, SavingNet, loader

parser = argparse.ArgumentParser()
parser.add_argument("--hyperparameters", action="store_true")
parser.add_argument("--seed", action="store_true")
parser.add_argument("--retry", action="store_true")
arguments = parser.parse_args()


def objective(trial: Trial) -> float:
    """Train with the values of a trial."""
    if arguments.seed:
        seed_everything(1)
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    model = SavingNet(lr) if arguments.hyperparameters else Net(lr)
    name = f"trial-{trial.number}"
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt(name)])
    trainer.fit(model, loader())
    finished(name, model, lr=lr)
    return float(trainer.callback_metrics["loss"])


study = optuna.create_study(
    study_name="tiny",
    storage=RDBStorage(
        "sqlite:///study.db",
        heartbeat_interval=1 if arguments.retry else None,
        grace_period=2 if arguments.retry else None,
        heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback() if arguments.retry else None,
    ),
    sampler=optuna.samplers.GridSampler({"lr": [0.01, 0.03, 0.1]}, seed=1) if arguments.seed else None,
    load_if_exists=True,
)
num_done = len(study.get_trials(states=[TrialState.COMPLETE]))
study.optimize(objective, n_trials=3 - num_done)
