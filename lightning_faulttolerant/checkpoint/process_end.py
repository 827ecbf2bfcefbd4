"""Call a function when this process ends, early enough for it to reach a remote store."""

from __future__ import annotations

import atexit
import multiprocessing
import threading
from collections.abc import Callable


def call_at_end(function: Callable[[], None], *, is_remote: bool) -> None:
    """Call a function when the interpreter ends; it may be called twice.

    Args:
        function: Takes no arguments.
        is_remote: Whether it needs the network.
    """
    atexit.register(function)
    # asyncio resolves hosts in threads, and threads can't be started any more when the functions of atexit are called.
    # A function that needs the network must run before. It is registered like the end of asyncio's own thread pool.
    # (That pool registers itself when it is first used, and the functions are called in the reverse order.) These
    # functions are also the only ones that a process of `multiprocessing` calls when it ends.
    register = getattr(threading, "_register_atexit", None)
    if register is not None and (is_remote or multiprocessing.parent_process() is not None):
        register(function)
