"""The example's training script for jobs of the tests: slow until it is asked to stop, and as fast as it can be then.

The weights are those of the example. Variables of the job's environment say what is different:

- `NUM_EPOCHS`: how many epochs it trains.
- `SECONDS_PER_BATCH`: how long each batch takes at least while the job runs for the first time.
- `SECONDS_BEFORE_IMPORTS`: how long the last task waits before it imports anything, the first time.
"""

import os
import sys
import time
from pathlib import Path

HERE = Path(os.environ["SLURM_SUBMIT_DIR"])
RANK = int(os.environ["SLURM_PROCID"])
# Not SLURM_RESTART_COUNT: a job that is submitted again has a new number.
FIRST = HERE / f"began-{os.environ.get('SLURM_ARRAY_TASK_ID', '')}-{RANK}"
is_first = not FIRST.exists()
FIRST.touch()
if is_first and int(os.environ["SLURM_NTASKS"]) - 1 == RANK:
    time.sleep(float(os.environ.get("SECONDS_BEFORE_IMPORTS", "0")))

import runpy  # noqa: E402

import lightning.pytorch  # noqa: E402


class Pace(lightning.pytorch.Callback):
    """Gives batches their length, and prints that training has begun."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if is_first:
            time.sleep(float(os.environ.get("SECONDS_PER_BATCH", "0")))
        if trainer.global_step == 3 and trainer.is_global_zero:
            print("third batch", flush=True)


class ShortTrainer(lightning.pytorch.Trainer):
    """Trains for a few epochs only, and draws nothing."""

    def __init__(self, *, callbacks, **arguments):
        own = {"max_epochs": int(os.environ["NUM_EPOCHS"]), "enable_model_summary": False, "logger": False}
        super().__init__(callbacks=[*callbacks, Pace()], **{**arguments, **own})


lightning.pytorch.Trainer = ShortTrainer
sys.argv = ["train.py"]
runpy.run_path(os.environ["EXAMPLE"], run_name="__main__")
