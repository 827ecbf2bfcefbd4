"""What all tests share: one thread, since they fork, and since sums differ in the last bits between thread counts."""

from __future__ import annotations

import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from tests.s3 import CREDENTIALS, client, s3_server

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # so a shell starts what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A busy machine is no failure; pytest's own time-out ends what hangs.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before -m "not slow" is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the laws: they fork most, and a fork takes the longer the more memory other tests have left in use."""
    items.sort(key=lambda item: not _is_law(item))
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if _is_law(item) and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for same in cases.values():
        for number, item in enumerate(same):
            if _is_slow(number, len(same)):
                item.add_marker(pytest.mark.slow)


def _is_law(item: pytest.Item) -> bool:
    return item.nodeid.startswith("tests/law/")


def _is_slow(number: int, count: int) -> bool:
    """Return whether this one of a law's cases is a slow test: one of three, half of four, three quarters of eight.

    Of two parameters with two values each, both values of both are kept.
    """
    if count < 4:
        return count == 3 and number == 1
    return number.bit_count() % 2 == 1 or (count >= 8 and (number >> 1).bit_count() % 2 == 1)


def pytest_collection_finish() -> None:
    """Keep the garbage collector of forked processes from what all share: it would copy each page that it looks at."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name what fails at once: a suite that runs out of time never comes to its summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nnot passed: {report.nodeid} ({report.duration:.0f} s)", file=sys.__stderr__, flush=True)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the variables of the surroundings out of the tests."""
    for name in [name for name in os.environ if name.startswith(("PL_", "SLURM_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 API on localhost."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def _s3_clients() -> Iterator[None]:
    """Let s3fs's clients go behind the tests that used them: in a process forked later each waits for its thread."""
    yield
    s3fs = sys.modules.get("s3fs")
    if s3fs is not None:
        s3fs.S3FileSystem.clear_instance_cache()
        gc.collect()


@pytest.fixture
def s3(s3_endpoint: str, _s3_clients: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty bucket, with the credentials in the environment."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    bucket = f"bucket-{uuid.uuid4().hex[:12]}"
    client(s3_endpoint).create_bucket(Bucket=bucket)
    return f"s3://{bucket}"
