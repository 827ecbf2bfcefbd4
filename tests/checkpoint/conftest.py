from __future__ import annotations

import uuid
from pathlib import Path

import fsspec.config
import pytest

PART_BYTES = 5 * 1024 * 1024


@pytest.fixture(params=["local", "memory", "s3"])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Yield a directory that does not exist yet, in each kind of store."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/runs/run"
    return str(tmp_path / "run") if request.param == "local" else f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture(params=["memory", "s3"])
def remote_url(request: pytest.FixtureRequest) -> str:
    """Yield a directory that does not exist yet, in each kind of store that is not a local directory."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/runs/run"
    return f"memory://{uuid.uuid4().hex}/run"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let uploads to S3 send parts of the smallest size, in bytes."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": PART_BYTES})
    return PART_BYTES
