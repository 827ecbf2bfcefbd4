"""What belongs to one process: a forked child, a data-loading worker above all, begins without it."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import final


@final
class ProcessLock:
    """A lock between the threads of one process that a forked child finds open, whoever held it in the parent.

    It is pickled as an open one.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._process_id != os.getpid():
            # The thread that holds it was not forked.
            self._process_id, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()
