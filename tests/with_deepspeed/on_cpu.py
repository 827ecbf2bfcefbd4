"""DeepSpeed's strategy on the CPU, for the environment that has DeepSpeed (``make deepspeed``)."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy


class DeepSpeedOnCpu(DeepSpeedStrategy):
    """ZeRO on the CPU. DeepSpeed runs it there (``DS_ACCELERATOR=cpu``); Lightning requires a GPU.

    It saves and loads as Lightning's class does.
    """

    def __init__(self, **arguments: Any) -> None:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # otherwise each process compiles a test of each extension
        super().__init__(**arguments)

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()
