"""One S3 server for all processes of a suite. The first process that needs it starts it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from pathlib import Path

from tests.s3 import start_server

_DIRECTORY = "TESTS_S3_DIRECTORY"
_servers: list[object] = []
"""Kept, since Python complains about a process object that is deleted while the process runs."""


def share_server(directory: Path) -> None:
    """Let this process and its forked children share one server, which is recorded in this directory."""
    os.environ[_DIRECTORY] = str(directory)


def shared_endpoint() -> str | None:
    """Return the address of the shared server, and start it if needed; ``None`` if no server is shared."""
    if _DIRECTORY not in os.environ:
        return None
    note = Path(os.environ[_DIRECTORY], "s3.txt")
    with open(note, "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        noted = file.read()
        if not noted:
            server, endpoint = start_server()
            _servers.append(server)
            noted = f"{endpoint} {server.pid}"
            file.write(noted)
        return noted.split()[0]


def stop_server(directory: Path) -> None:
    """Stop the server, if it was ever started."""
    note = directory / "s3.txt"
    if note.exists():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(note.read_text().split()[1]), signal.SIGKILL)
