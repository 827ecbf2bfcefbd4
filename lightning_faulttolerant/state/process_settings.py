"""Settings of the whole process that training may change: those of torch, NumPy, and Python."""

from __future__ import annotations

import contextlib
import decimal
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch


def _attribute(owner: Callable[[], object], name: str) -> tuple[Callable[[], object], Callable[[Any], object]]:
    return lambda: getattr(owner(), name), lambda value: setattr(owner(), name, value)


def _default_dtype() -> str:
    return str(torch.get_default_dtype()).removeprefix("torch.")


def _errors_of_numpy() -> dict[str, str]:
    return dict(sys.modules["numpy"].geterr())  # it need not be installed


_SETTINGS: Mapping[str, tuple[Callable[[], object], Callable[[Any], object]]] = {
    "default dtype": (_default_dtype, lambda name: torch.set_default_dtype(getattr(torch, name))),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "detection of anomalies": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "cudnn.benchmark": _attribute(lambda: torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(lambda: torch.backends.cudnn, "deterministic"),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    "memory-efficient attention": (
        torch.backends.cuda.mem_efficient_sdp_enabled,
        torch.backends.cuda.enable_mem_efficient_sdp,
    ),
    "plain attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    "errors of NumPy": (_errors_of_numpy, lambda kinds: sys.modules["numpy"].seterr(**kinds)),
    "precision of decimal": _attribute(decimal.getcontext, "prec"),
    "rounding of decimal": _attribute(decimal.getcontext, "rounding"),
}


def process_settings() -> dict[str, object]:
    """Return all settings by name, except those that can't be read."""
    found = {}
    for name, (read, _) in _SETTINGS.items():
        with contextlib.suppress(Exception):  # torch refuses to read some if they contradict each other
            found[name] = read()
    return found


def set_process_settings(settings: Mapping[str, object]) -> None:
    """Set these settings."""
    for name, value in settings.items():
        if name in _SETTINGS:
            _SETTINGS[name][1](value)
