"""The faults that can happen in a step.

A fault is a function of the step and of the function that carries it out. Its return value or error is what the
program sees. Write your own if these are not enough::

    def slow(step, carry_out):
        time.sleep(0.1)
        return carry_out()
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from lightning_faulttolerant.testing.steps import Step

# ``carry_out()`` does the whole step. ``carry_out(n)`` writes only the first n bytes, if the step is a write.
Fault = Callable[[Step, Callable[..., Any]], Any]


def fail_with(error_number: int) -> Fault:
    """Return a fault that raises an ``OSError`` instead of doing the step.

    Args:
        error_number: Such as ``errno.ENOSPC`` (no space), ``EIO`` (bad disk), ``EACCES`` (not yours), ``EDQUOT``
            (quota), ``ESTALE`` (a network file system lost the file), ``EROFS`` (mounted read-only).
    """

    def fail(step: Step, carry_out: Callable[..., Any]) -> Any:
        raise OSError(error_number, os.strerror(error_number), str(step.path))

    return fail


def write_short(step: Step, carry_out: Callable[..., Any]) -> Any:
    """Write only the first half of the data, and return the short count, as a system call may."""
    _demand_kind(step, ("write",), "write_short")
    return carry_out((step.num_bytes + 1) // 2)


def lose(step: Step, carry_out: Callable[..., Any]) -> Any:
    """Report the step as done without doing it."""
    _demand_kind(step, _LOSABLE, "lose")
    return step.num_bytes if step.kind == "write" else None


def kill_before(step: Step, carry_out: Callable[..., Any]) -> Any:
    """Kill the process (SIGKILL) instead of doing the step: use it in a process started for that."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(step: Step, carry_out: Callable[..., Any]) -> Any:
    """Do the step, then kill the process (SIGKILL), even if the step failed: use it in a process started for that."""
    try:
        carry_out()
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


_LOSABLE = ("write", "fsync", "fsync_directory", "rename", "unlink", "link", "mkdir", "rmdir")


def _demand_kind(step: Step, kinds: tuple[str, ...], fault: str) -> None:
    if step.kind not in kinds:
        raise ValueError(
            f"{fault} makes no sense for a step of kind {step.kind!r}. "
            f"Give FaultyFiles a kind, one of: {', '.join(kinds)}."
        )
