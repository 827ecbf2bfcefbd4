"""State that belongs to one process: a forked child, above all a data-loading worker, begins without it."""

from __future__ import annotations

import os
import threading
from types import TracebackType
from typing import final


@final
class ProcessLock:
    """A lock between the threads of one process. A forked child finds it open, even if the parent held it.

    It is pickled as an open lock.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if self._process_id != os.getpid():
            # The fork did not copy the thread that holds it.
            self._process_id, self._lock = os.getpid(), threading.RLock()
        self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[ProcessLock], tuple[()]]:
        return ProcessLock, ()
