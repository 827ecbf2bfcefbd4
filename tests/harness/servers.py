"""The servers of a suite: one of each kind for all its processes. The first process that needs one starts it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

_DIRECTORY = "TESTS_SERVERS_DIRECTORY"
_servers: list[object] = []
"""Kept, since Python complains about a process object that is deleted while the process runs."""


def share_servers(directory: Path) -> None:
    """Let this process and its forked children share servers, which are recorded in this directory."""
    os.environ[_DIRECTORY] = str(directory)


@contextlib.contextmanager
def server(kind: str, start: Callable[[], tuple[subprocess.Popen[bytes], str]]) -> Iterator[str]:
    """Yield the address of the suite's server of a kind, and start it if needed; without a suite, end it then.

    Args:
        kind: Its name, as part of a file name.
        start: Starts a server, and returns it with its address.
    """
    if _DIRECTORY in os.environ:
        yield _shared(Path(os.environ[_DIRECTORY], f"server-{kind}.txt"), start)
        return
    own, address = start()
    with own:
        try:
            yield address
        finally:
            own.kill()


def _shared(note: Path, start: Callable[[], tuple[subprocess.Popen[bytes], str]]) -> str:
    with open(note, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        noted = file.read()
        if not noted:
            server, address = start()
            _servers.append(server)
            noted = f"{address} {server.pid}"
            file.write(noted)
        return noted.split()[0]


def stop_servers(directory: Path) -> None:
    """Stop the servers that were started."""
    for note in directory.glob("server-*.txt"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(note.read_text().split()[1]), signal.SIGKILL)
