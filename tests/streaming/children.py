"""Forked processes that a test waits for, stops, and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any


class Child:
    """A forked process that runs a function and exits without any cleanup."""

    def __init__(self, main: Callable[[], Any]) -> None:
        self.process_id = os.fork()
        if not self.process_id:
            code = 1
            try:
                main()
                code = 0
            finally:
                os._exit(code)
        self._is_over = False

    def wait(self) -> int:
        """Return the exit code once the process has ended."""
        self._is_over = True
        return os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])

    def kill(self) -> None:
        """Kill the process if it has not ended, and wait for its end."""
        if not self._is_over:
            os.kill(self.process_id, signal.SIGKILL)
            self.wait()


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
