"""Write after the work that continues: one job at a time, in a thread that lives as long as its job.

So nothing is left over that would have to be shut down, and a process that is forked meanwhile has no writer: threads
are not forked.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import final

_LETS_GO_ON_SECONDS = 0.001


class _Job:
    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.is_done = threading.Event()
        self._is_taken = threading.Lock()

    def take(self) -> bool:
        """Return True to the first who asks: the thread that does the job, or who gives it up before that."""
        return self._is_taken.acquire(blocking=False)


@final
class BackgroundWriter:
    """Does one job at a time in a thread.

    The interpreter does not exit before a job that is under way is done.

    Args:
        name: Of the thread.

    Example:
        >>> writer = BackgroundWriter("example")
        >>> written = []
        >>> writer.start(lambda: written.append("a file"))
        >>> writer.wait()
        >>> written, writer.take_error()
        (['a file'], None)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._job: _Job | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether a job of this process is under way."""
        job = self._job
        return job is not None and job.process_id == os.getpid() and not job.is_done.is_set()

    def start(self, job: Callable[[], object]) -> None:
        """Begin a job.

        Args:
            job: What it raises is kept for ``take_error``.

        Raises:
            RuntimeError: If the one before is still under way, or the system has no thread left.
        """
        if self.is_busy:
            raise RuntimeError(f"The writer {self._name!r} has a job already. Wait for it.")
        this = _Job()
        thread = threading.Thread(target=self._run, args=(this, job), name=self._name)
        try:
            self._job = this
            thread.start()
        except BaseException:  # a signal handler may raise at any moment, with the thread begun or not
            if this.take():
                this.is_done.set()  # nobody else will: who waits would wait for ever
            raise

    def wait(self) -> None:
        """Wait until no job is under way. A signal handler that raises breaks the wait, not the job."""
        if self.is_busy and self._job is not None:
            self._job.is_done.wait()

    def take_error(self) -> BaseException | None:
        """Return what the last job raised, once: as it was, with its traceback."""
        error, self._error = self._error, None
        return error

    def _run(self, this: _Job, job: Callable[[], object]) -> None:
        if not this.take():
            return
        # Else this thread keeps the interpreter for up to 5 ms while the one that has started it waits to continue.
        time.sleep(_LETS_GO_ON_SECONDS)
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - it is raised where somebody asks for it
            self._error = error
        finally:
            this.is_done.set()
