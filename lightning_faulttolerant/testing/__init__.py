"""For your own tests: `assert_resumes_exactly`, and files that fail, are lost, or kill the process at a chosen step.

The faults do not need Lightning. It is imported with `assert_resumes_exactly` or one of its parts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from lightning_faulttolerant.testing.faults import (
    Fault,
    FaultyURLs,
    Step,
    fail_with,
    kill_after,
    kill_before,
    lose,
    write_short,
)
from lightning_faulttolerant.testing.faulty_files import FaultyFiles, PowerLoss, PowerLost

if TYPE_CHECKING:
    from lightning_faulttolerant.testing.exactness import Interruption, KillAt, NotTheSame, assert_resumes_exactly

__all__ = [
    "Fault",
    "FaultyFiles",
    "FaultyURLs",
    "Interruption",
    "KillAt",
    "NotTheSame",
    "PowerLoss",
    "PowerLost",
    "Step",
    "assert_resumes_exactly",
    "fail_with",
    "kill_after",
    "kill_before",
    "lose",
    "write_short",
]

_LAZY = ("Interruption", "KillAt", "NotTheSame", "assert_resumes_exactly")


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module("lightning_faulttolerant.testing.exactness"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
