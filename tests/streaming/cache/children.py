"""Forked processes that a test waits for, stops and kills."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any


class Child:
    """A forked process that runs a function, and ends without anything being called."""

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
        """Return its exit code, once it has ended."""
        self._is_over = True
        return os.waitstatus_to_exitcode(os.waitpid(self.process_id, 0)[1])

    def stop(self) -> None:
        """Let it sleep."""
        os.kill(self.process_id, signal.SIGSTOP)

    def kill(self) -> None:
        """Kill it, if it has not ended, and wait for its end."""
        if not self._is_over:
            os.kill(self.process_id, signal.SIGKILL)
            self.wait()


@contextlib.contextmanager
def child(main: Callable[[], Any]) -> Iterator[Child]:
    """Run a function in a forked process, which ends with the block."""
    process = Child(main)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def held_by_a_thread(*locks: Any) -> Iterator[None]:
    """Let another thread be inside of locks, as it may be at the moment of a fork."""
    is_inside, is_over = threading.Event(), threading.Event()

    def hold() -> None:
        with contextlib.ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            is_inside.set()
            is_over.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    is_inside.wait()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def run_all(mains: list[Callable[[], Any]]) -> list[int]:
    """Run functions in forked processes at the same time; return their exit codes."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(child(main)) for main in mains]
        return [process.wait() for process in children]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until something is so; pytest's time-out ends what never is."""
    while not condition():
        time.sleep(0.002)
