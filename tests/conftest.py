"""Setup for all tests: one thread, since they fork, and since sums differ in the last bits between thread counts."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec.config
import hypothesis
import pytest
import torch

from lightning_faulttolerant.state.objects.walk import users_namespaces
from tests.emulators import EMULATORS, WARNING, use_clients
from tests.harness.servers import server
from tests.s3 import CREDENTIALS, client, start_server

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs this way
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is not a failure; pytest's own timeout ends tests that hang.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

_CLIENTS = (("s3fs", "S3FileSystem"), ("adlfs", "AzureBlobFileSystem"), ("gcsfs", "GCSFileSystem"))
_PART_BYTES = 5 * 1024 * 1024


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `make quick` and of the pieces of a night."""
    parser.addoption("--one-of-each-law", action="store_true", help="only the first fast case of each law")
    parser.addoption("--part", default="0/1", help="only every so manieth test of a file: 2/6 is the third of each six")


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested part, or one case of each test."""
    part, num_parts = map(int, config.getoption("--part").split("/"))
    if items:
        first = zlib.crc32(items[0].path.name.encode())  # a file of few tests has them in any part
        items[:] = [item for number, item in enumerate(items) if (first + number) % num_parts == part]
    if config.getoption("--one-of-each-law"):
        fast = [item for item in reversed(items) if item.get_closest_marker("slow") is None]
        items[:] = {item.nodeid.partition("[")[0]: item for item in fast}.values()  # the first of each is kept


def pytest_collection_finish() -> None:
    """Keep forked processes from copying pages: of shared objects by garbage collection, of modules by a search."""
    users_namespaces({})  # looks at all modules, and again only after an import
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove environment variables that affect a test."""
    for name in [name for name in os.environ if name.startswith(("PL_", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 API on localhost."""
    importlib.import_module("s3fs")  # once here, not in each forked process
    with server("s3", start_server) as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def _ports() -> Iterator[Callable[[str], int]]:
    """Yield a function that returns the port of the emulator with a name, and starts it if needed."""
    use_clients()
    with contextlib.ExitStack() as ends:
        yield functools.lru_cache(lambda name: int(ends.enter_context(server(name, EMULATORS[name].start))))


@pytest.fixture
def emulated(
    _ports: Callable[[str], int], monkeypatch: pytest.MonkeyPatch, _clients: None
) -> Iterator[Callable[[str], str]]:
    """Yield a function that returns the URL of an empty bucket of an emulator, with what its client needs to know."""

    def new_bucket(name: str) -> str:
        emulator, port = EMULATORS[name], _ports(name)
        for variable, value in emulator.variables(port).items():
            monkeypatch.setenv(variable, value)
        return emulator.create(port, f"bucket-{uuid.uuid4().hex[:12]}")

    _release_clients()  # s3fs finds its server when a client is created, and moto is another one
    yield new_bucket
    _release_clients()


@pytest.fixture(scope="module")
def _clients() -> Iterator[None]:
    """Release the clients of stores after their tests: in a process forked later, each waits for its thread."""
    yield
    if _release_clients():
        gc.collect()


def _release_clients() -> int:
    loaded = [(sys.modules[module], name) for module, name in _CLIENTS if module in sys.modules]
    for module, name in loaded:
        getattr(module, name).clear_instance_cache()
    return len(loaded)


@pytest.fixture
def s3(s3_endpoint: str, _clients: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, with the credentials in the environment."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client(s3_endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}"


_AS_EMULATED = [pytest.mark.slow, pytest.mark.filterwarnings(WARNING)]
_EMULATED = [pytest.param(name, marks=_AS_EMULATED) for name in sorted(EMULATORS)]


@pytest.fixture(params=["local", "memory", "s3", *_EMULATED])
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Yield a directory that does not exist yet, in each kind of store."""
    return str(tmp_path / "run") if request.param == "local" else _remote_url(request)


@pytest.fixture(params=["memory", "s3", *_EMULATED])
def remote_url(request: pytest.FixtureRequest) -> str:
    """Yield a directory that does not exist yet, in each kind of store that is not a local directory."""
    return _remote_url(request)


def _remote_url(request: pytest.FixtureRequest) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/runs/run"
    return f"{request.getfixturevalue('emulated')(request.param)}/runs/run"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let uploads to S3 send parts of the smallest size, in bytes."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"default_block_size": _PART_BYTES})
    return _PART_BYTES
