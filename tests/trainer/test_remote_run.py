"""A run below a URL is refused before any training if it can't be saved, and is cleaned up when it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import LambdaCallback

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.storage.store import open_store
from tests.laws.cuts import At
from tests.processes import run
from tests.runs import fit_net
from tests.s3 import CREDENTIALS, s3_server


def fit_at(dirpath: str, directory: Path, **environment: str) -> str:
    """Fit with autosaves below a URL, in a process with these variables; return its output."""

    def main() -> None:
        os.environ.update(CREDENTIALS, AWS_MAX_ATTEMPTS="1", **environment)
        says = LambdaCallback(on_train_batch_start=lambda *_: print("a batch was trained"))
        fit_net([FaultTolerance(dirpath), says], directory)

    ended = run(main)
    assert (ended.exit_code == 0) == ("a batch was trained" in ended.output)
    return ended.output


def test_wrong_credentials_are_refused_before_training(tmp_path: Path) -> None:
    """Keys that the store does not know are reported as wrong at the start, with the settings to check."""
    with s3_server(INITIAL_NO_AUTH_ACTION_COUNT="0") as endpoint:
        output = fit_at("s3://bucket/runs", tmp_path, AWS_ENDPOINT_URL=endpoint)
    assert "CheckpointError: The autosaves of this run can't be written to s3://bucket/runs/" in output
    assert "The AWS Access Key Id you provided does not exist in our records" in output
    assert "Check the credentials" in output


def test_missing_package_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the client of the store isn't installed, the error says what to install."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    assert "pip install gcsfs" in fit_at("gs://bucket/runs", tmp_path)


def test_run_that_has_lost_its_lock_saves_nothing(tmp_path: Path, s3: str) -> None:
    """A run that has lost its lock fails at its next save, before it overwrites the new owner's autosaves."""

    def lose_the_lock() -> None:
        [name] = open_store(s3).names()
        open_store(f"{s3}/{name}").delete("run.lock")

    callbacks = [FaultTolerance(s3, every_n_train_steps=1), At({(0, 3): lose_the_lock})]
    ended = run(lambda: fit_net(callbacks, tmp_path))
    assert ended.exit_code == 1
    assert "RunInUseError: The lock of this run" in ended.output
    [name] = open_store(s3).names()
    assert open_store(f"{s3}/{name}/fit-1").names()[-1].endswith("-epoch=0-batch=3.ckpt")
