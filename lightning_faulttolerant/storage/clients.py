"""Settings for the clients of fsspec's file systems, for all reads and writes through them."""

from __future__ import annotations

import random
import sys
from typing import Any

from fsspec.config import conf

S3_PROTOCOLS = ("s3", "s3a")
# Their retries wait a random time, drawn from the global generator of `random`: in fsspec's thread, at any moment.
_DRAWING_MODULES = ("botocore.retryhandler", "aiohttp.connector", "gcsfs.retry")


def client_options(protocol: str) -> dict[str, Any]:
    """Return the options for creating a protocol's file system, in addition to the user's."""
    if protocol not in S3_PROTOCOLS:
        return {}
    given = {**conf.get("s3a", {}), **conf.get("s3", {})}.get("config_kwargs", {})
    # The mode "standard" draws random numbers in a way that can't be redirected, and is the default for some.
    return {"config_kwargs": {"retries": {"mode": "legacy"}, **given}}


def let_retries_draw_elsewhere() -> None:
    """Give the loaded clients their own generator, so that no retry draws from the run's generator."""
    for name in _DRAWING_MODULES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "random", None) is random:
            module.random = random.Random()  # type: ignore[attr-defined]


def missing_package(error: ImportError) -> str:
    """Return the name of the missing package that caused fsspec's `error`."""
    # fsspec raises its own ImportError, with advice, from the one that names the module.
    missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
    return (missing.name or "the package that it needs").partition(".")[0]
