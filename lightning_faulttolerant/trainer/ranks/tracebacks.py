"""The traceback of an exception that ends one rank of several: printed immediately, and only once.

The teardown that follows may wait for other ranks until the process is killed, and then Python prints nothing. If the
exception does end the process, Python would print the same traceback again.
"""

from __future__ import annotations

import sys
import traceback
from types import TracebackType


def print_traceback(exception: BaseException, rank: int) -> None:
    """Print an exception with its traceback, and let Python add one line if it ends the process.

    Args:
        exception: The exception that ended the rank.
        rank: The number of the rank.
    """
    trace = "".join(traceback.format_exception(exception))
    sys.stderr.write(f"\n[rank {rank}] FaultTolerance: an exception has ended this rank.\n{trace}")
    sys.stderr.flush()
    original = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if error is not exception:
            original(kind, error, trace)
            return
        message = "".join(traceback.format_exception_only(kind, error)).rstrip()
        sys.stderr.write(f"[rank {rank}] {message}\n[rank {rank}] Its traceback is printed above.\n")

    sys.excepthook = excepthook
