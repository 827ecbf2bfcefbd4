"""The function that Lightning lets new data-loading workers call if the user passed none."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch import Trainer


def default_worker_init(trainer: Trainer) -> Callable[[int], None] | None:
    """Return the ``worker_init_fn`` that Lightning sets under ``seed_everything(workers=True)``, else ``None``.

    Lightning sets it after ``process_dataloader``, and only if the loader has none. Our loader has one by then.
    """
    if not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return None
    return partial(pl_worker_init_function, rank=trainer.global_rank)
