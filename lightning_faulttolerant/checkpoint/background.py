"""Write in the background while the work continues: one job at a time, in a thread that lives as long as its job.

So there is never an idle thread to shut down. A process that is forked during a job has no writer: threads are not
forked.
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
        """Return True to the first caller: the thread that does the job, or the caller that gives it up before that."""
        return self._is_taken.acquire(blocking=False)


@final
class BackgroundWriter:
    """A writer that does one job at a time in a thread.

    The interpreter does not exit before a running job is done.

    Args:
        name: The name of the thread.

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
        """Whether a job of this process is running."""
        job = self._job
        return job is not None and job.process_id == os.getpid() and not job.is_done.is_set()

    def start(self, job: Callable[[], object]) -> None:
        """Start a job.

        Args:
            job: An error that it raises is kept for ``take_error``.

        Raises:
            RuntimeError: If the previous job is still running, or the system has no thread left.
        """
        if self.is_busy:
            raise RuntimeError(f"The writer {self._name!r} already has a job. Wait for it.")
        this = _Job()
        thread = threading.Thread(target=self._run, args=(this, job), name=self._name)
        try:
            self._job = this
            thread.start()
        except BaseException:  # a signal handler may raise at any moment, with the thread begun or not
            if this.take():
                this.is_done.set()  # nothing else will: a waiter would wait forever
            raise

    def wait(self) -> None:
        """Wait until no job is running. A signal handler that raises breaks the wait, not the job."""
        if self.is_busy and self._job is not None:
            self._job.is_done.wait()

    def take_error(self) -> BaseException | None:
        """Return the error of the last job, once, unchanged and with its traceback."""
        error, self._error = self._error, None
        return error

    def _run(self, this: _Job, job: Callable[[], object]) -> None:
        if not this.take():
            return
        # Otherwise this thread keeps the interpreter for up to 5 ms while the thread that started it waits to continue.
        time.sleep(_LETS_GO_ON_SECONDS)
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - kept for take_error
            self._error = error
        finally:
            this.is_done.set()
