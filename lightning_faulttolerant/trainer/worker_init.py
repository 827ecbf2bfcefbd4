"""What Lightning lets new data-loading workers call where the user gave them nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer


def default_worker_init(trainer: Trainer) -> Callable[[int], None] | None:
    """Return what Lightning sets as ``worker_init_fn`` under ``seed_everything(workers=True)``, else ``None``.

    Lightning sets it after ``process_dataloader``, and only where there is none: ours is there by then.
    """
    if not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return None
    return partial(pl_worker_init_function, rank=trainer.global_rank)
