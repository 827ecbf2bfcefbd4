"""The places that a drill requests in a fit: where it saves, and where it waits."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.records.ledger import HOLD_VARIABLE, SAVE_VARIABLE, places_in, places_text
from tests.ledgers import read_ledger, with_ledger
from tests.processes import run
from tests.runs import fit_net


def fit(directory: Path, **options: Any) -> None:
    """Fit with a ledger, and with no regular autosave after the first."""
    own = with_ledger(directory / "ledger.jsonl", directory / "saves", every_n_train_steps=1000, **options)
    fit_net([own], directory)


def places(directory: Path, kind: str) -> list[tuple[int, int]]:
    """Return the places of the lines of that kind."""
    return [(line["epoch"], line["batch"]) for line in read_ledger(directory / "ledger.jsonl").fits[0].of(kind)]


@pytest.mark.parametrize("is_async", [False, True])
def test_it_saves_before_the_batches_that_are_named(
    is_async: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves there, in the named fit, and otherwise only at the start and at the end."""
    monkeypatch.setenv(SAVE_VARIABLE, "1:0:2,1:1:1,2:0:3")
    ended = run(lambda: fit(tmp_path, async_save=is_async))
    assert ended.exit_code == 0, ended.output
    assert places(tmp_path, "autosave")[:3] == [(0, 0), (0, 2), (1, 1)]
    assert len(places(tmp_path, "autosave")) == 4


def test_it_waits_for_a_stop_before_the_batch_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch before it is finished, no later one has begun, and the stop is saved exactly there."""
    monkeypatch.setenv(HOLD_VARIABLE, "1:1:2")

    def main() -> None:
        def stop() -> None:
            while not read_ledger(tmp_path / "ledger.jsonl").fits or (1, 1) not in places(tmp_path, "batch"):
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        fit(tmp_path)

    ended = run(main)
    assert ended.exit_code == 143, ended.output
    assert places(tmp_path, "batch")[-1] == (1, 1)
    assert places(tmp_path, "autosave")[-1] == (1, 2)


def test_places_are_read_as_they_are_written() -> None:
    """The run reads what the drill writes; any other value is an error that shows it."""
    assert places_in(SAVE_VARIABLE, places_text([(1, 0, 2), (12, 3, 40)])) == [(1, 0, 2), (12, 3, 40)]
    for text in ("", "1:2", "1:2:3,", "1:2:x"):
        with pytest.raises(ValueError, match=r"PL_FAULT_TOLERANT_SAVE_AT must be <fit>:<epoch>:<batch>"):
            places_in(SAVE_VARIABLE, text)
