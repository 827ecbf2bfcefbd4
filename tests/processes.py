"""Functions in forked processes: as a separate script, with Python's cleanup at exit, or without any cleanup."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_faulttolerant.testing.processes import fork_and_run


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it printed."""

    exit_code: int
    output: str


class Script:
    """A process that runs `main` and then ends as Python does."""

    def __init__(
        self,
        main: Callable[[], Any],
        *,
        arguments: tuple[str, ...] = (),
        seed: int = 1,
        path: str = "/scripts/script.py",
    ) -> None:
        self._output = Path(tempfile.mkstemp(suffix=".txt")[1])
        script = functools.partial(as_script, main, arguments, path)
        self.process_id = fork_and_run(script, output=self._output, seed=seed)

    def is_running(self) -> bool:
        """Return whether it has not ended; `wait` still has to be called."""
        return os.waitid(os.P_PID, self.process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def printed(self) -> str:
        """Return what it has printed so far."""
        return self._output.read_text()

    def wait(self) -> Ended:
        """Wait until it ends. If the test ends before, as at its limit of time, kill it."""
        try:
            status = os.waitpid(self.process_id, 0)[1]
        except BaseException:
            os.killpg(self.process_id, signal.SIGKILL)
            print(self.printed())
            raise
        return Ended(os.waitstatus_to_exitcode(status), self.printed())


def as_script(main: Callable[[], Any], arguments: tuple[str, ...], path: str) -> None:
    """Run `main` with arguments, and then Python's cleanup at exit."""
    atexit._clear()
    sys.modules["__main__"].__file__ = path
    sys.argv = [os.path.basename(path), *arguments]
    try:
        main()
    except SystemExit:
        raise
    except BaseException as error:
        sys.last_value = error
        raise
    finally:
        atexit._run_exitfuncs()


def run(main: Callable[[], Any], **arguments: Any) -> Ended:
    """Run `main` as a script and wait until it ends."""
    return Script(main, **arguments).wait()


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
                if code:
                    traceback.print_exc()
                os._exit(code)
        self._is_over = False

    def __enter__(self) -> Child:
        """End the process with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self) -> int:
        """Return the exit code once the process has ended."""
        status = os.waitpid(self.process_id, 0)[1]
        self._is_over = True
        return os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """Kill the process if it has not ended, and wait for its end."""
        if not self._is_over:
            os.kill(self.process_id, signal.SIGKILL)
            self.wait()


def in_child(main: Callable[[], Any]) -> int:
    """Run `main` in a forked process that ends without any cleanup; return its exit code, or minus its signal."""
    return Child(main).wait()


def run_all(mains: Iterable[Callable[[], Any]]) -> list[int]:
    """Run functions in forked processes at the same time and return their exit codes."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(main)) for main in mains]
        return [child.wait() for child in children]


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds; pytest's time-out ends a wait that never does."""
    while not condition():
        time.sleep(0.002)


def dead_process_id() -> int:
    """Return the id of a process that has ended."""
    child = Child(int)
    child.wait()
    return child.process_id
