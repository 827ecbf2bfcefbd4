"""Forked processes that a test waits for, stops, and kills."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.processes import Child


@contextlib.contextmanager
def child(main: Callable[[], Any]) -> Iterator[Child]:
    """Run a function in a forked process that ends with the block."""
    process = Child(main)
    try:
        yield process
    finally:
        process.kill()


def run_all(mains: list[Callable[[], Any]]) -> list[int]:
    """Run functions in forked processes at the same time and return their exit codes."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child(main)) for main in mains]
        return [process.wait() for process in children]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; pytest's time-out ends a wait that never does."""
    while not condition():
        time.sleep(0.002)
