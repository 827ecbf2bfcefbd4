"""An S3 API on localhost, in a separate process, and helpers for tests of stores."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

# The name, not the number, so that names are resolved here as anywhere else.
HOST = "localhost"
# How many objects the server lists in one answer; a real one lists 1,000.
PAGE = 50
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}


@contextlib.contextmanager
def s3_server(**environment: str) -> Iterator[str]:
    """Run moto's server, and yield its address."""
    server, endpoint = start_server(**environment)
    with server:
        try:
            yield endpoint
        finally:
            server.kill()


def start_server(**environment: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start moto's server; return it with its address."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    server = start_listening(command, port, {"MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE), **environment})
    return server, f"http://{HOST}:{port}"


def start_listening(
    command: list[str], port: int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a server, in its own session, and wait until it listens at a port."""
    server = subprocess.Popen(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return server
            assert server.poll() is None, f"{command[0]} has ended"
            time.sleep(0.05)
    except BaseException:
        server.kill()
        raise


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@functools.lru_cache
def client(endpoint: str) -> Any:
    """Return a plain botocore client, which shares nothing with s3fs."""
    import botocore.session

    session = botocore.session.get_session()
    session.set_credentials("testing", "testing")
    return session.create_client("s3", endpoint_url=endpoint, region_name="us-east-1")
