"""What the first save of a process does once: imports, and tables that torch builds. It is done before training begins.

Otherwise, the first save takes several times as long as later ones, while training waits. The time of the first save
also decides when the next ones come, and whether one fits into a grace period.
"""

from __future__ import annotations

import functools
import io

import torch

from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.trainer.compat import import_for_dump


@functools.cache
def warm_up() -> None:
    """Save and load a checkpoint in memory, once in this process."""
    import_for_dump()
    file = io.BytesIO()
    save_to_file({"weights": {"a": torch.zeros(1, device="cpu")}}, file)
    file.seek(0)
    torch.load(file, map_location="cpu", weights_only=True)
