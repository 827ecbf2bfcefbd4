"""Where a ledger is written, how fits are numbered, and that none is written where none is asked for."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.errors import LedgerError
from lightning_faulttolerant.records.batches import BatchLine, BatchRecord
from lightning_faulttolerant.trainer.process import VARIABLE
from tests.laws.rows import Net
from tests.ledgers import read_ledger, with_ledger
from tests.processes import run
from tests.runs import fit_net


def fit_once(directory: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    """Fit two batches."""
    short = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    return fit_net(list(callbacks), directory, **{**short, **arguments})


def test_a_line_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    """A ledger never silently lacks a line: a full disk ends the run, and the error gives the remedy."""
    with pytest.raises(LedgerError, match="could not be added to the ledger"):
        fit_once(tmp_path, with_ledger("/dev/full", tmp_path / "saves"))


def test_each_fit_of_a_script_has_its_number(tmp_path: Path) -> None:
    """Fits are numbered within the process, whichever callback and trainer they have; trials don't count."""
    path = tmp_path / "ledger.jsonl"

    def script() -> None:
        shared = with_ledger(path, tmp_path / "saves")
        fit_once(tmp_path, shared)
        fit_once(tmp_path, shared, fast_dev_run=True)
        fit_once(tmp_path, with_ledger(path, tmp_path / "others"))
        os._exit(0)  # its autosaves are kept, and the second process resumes after the end of each fit

    assert [run(script, seed=seed).exit_code for seed in (1, 2)] == [0, 0]
    fits = read_ledger(path)
    assert [fit[0]["fit"] for fit in fits] == [1, 2] * 2
    resumed = [[line["text"] for line in fit.of("resumed")] for fit in fits]
    assert resumed == [[]] * 2 + [["after the end of the fit"]] * 2
    for one, other in zip(fits[:2], fits[2:], strict=True):
        assert {**one.end, "time": 0} == {**other.end, "time": 0}
        assert not other.of("batch")


def test_written_also_where_all_else_is_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved, and the ledger holds everything except the order of samples."""
    monkeypatch.setenv(VARIABLE, "0")
    path = tmp_path / "ledger.jsonl"
    fit_once(tmp_path, with_ledger(path, tmp_path / "saves"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["ledger.jsonl"]
    [fit] = read_ledger(path)
    expected = ["batch", "log", "batch", "log", "evaluated", "validated", "log", "log", "end"]
    assert [line["event"] for line in fit[1:]] == expected
    assert all(line["order"] is None and line["content"] for line in fit.of("batch"))


@pytest.mark.parametrize("switch", ["0", "1"])
def test_a_fit_inside_another_has_none(switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An inner fit is part of the outer fit's hook: its batches are not in the ledger, with the callback on or off."""
    monkeypatch.setenv(VARIABLE, switch)
    path = tmp_path / "ledger.jsonl"

    class Nested(Net):
        def on_train_epoch_end(self) -> None:
            fit_once(tmp_path, with_ledger(path, tmp_path / "inner"), module=Net())

    fit_once(tmp_path, with_ledger(path, tmp_path / "saves"), module=Nested())
    assert [len(fit.of("batch")) for fit in read_ledger(path)] == [2]


def test_has_the_indices_of_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger is the whole form of the record: both have the same checksum of the indices of each batch."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    noted: list[tuple[int, ...]] = []
    monkeypatch.setattr(BatchRecord, "_writer", lambda *_: lambda *line: noted.append(line))
    fit_once(tmp_path, with_ledger(tmp_path / "ledger.jsonl", tmp_path / "saves"), limit_train_batches=4)
    [fit] = read_ledger(tmp_path / "ledger.jsonl")
    orders = [f"{line.order:08x}" for line in map(BatchLine._make, noted) if not line.evaluated]
    assert orders == [line["order"] for line in fit.of("batch")]
    assert len(set(orders)) == 4
