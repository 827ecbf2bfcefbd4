"""A wandb whose server is a directory: a file of rows for each run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wandb.wandb_run import Run

run: Run | None = None
num_inits = 0


def init(**kwargs: Any) -> Run:
    """Begin a run, or continue the one of that id."""
    global run, num_inits
    num_inits += 1
    if run is None:
        own = kwargs.get("id") or os.environ.get("WANDB_RUN_ID") or os.urandom(4).hex()
        run = Run(own, Path(os.environ["STAND_IN_WANDB"]))
    return run
