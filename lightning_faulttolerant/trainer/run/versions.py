"""Versions, devices and threads. The last bits of the arithmetic depend on these besides the run itself."""

from __future__ import annotations

import platform
import sys
from typing import Any

import torch
from lightning.pytorch import Trainer, __version__  # type: ignore[attr-defined]  # it lists other names only


def surroundings(trainer: Trainer) -> dict[str, Any]:
    """Return the versions, the device and the threads that this process computes with."""
    numpy = sys.modules.get("numpy")
    device = trainer.strategy.root_device
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": str(__version__),
        "numpy": None if numpy is None else str(numpy.__version__),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if device.type == "cuda" else None,  # type: ignore[no-untyped-call]
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
