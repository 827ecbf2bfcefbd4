"""The lines of a replay are compared with those that the run has of the same moment, and with no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_faulttolerant.cli.replay import Compared, compare
from lightning_faulttolerant.records.lines import append_line


def _ledger(path: Path, *lines: dict[str, Any]) -> str:
    begin = {"event": "fit", "fit": 1, "function": "fit", "pid": 1}
    for line in (begin, *lines):
        append_line(path, {"fit": 1, "time": 0.0, **line})
    return str(path)


def _batch(batch: int, loss: float = 0.5, **more: Any) -> dict[str, Any]:
    return {"event": "batch", "epoch": 0, "batch": batch, "order": "o", "loss": loss.hex(), **more}


def _log(batch: int, value: float, *, epoch_end: bool = False) -> dict[str, Any]:
    place = {"epoch": 0, "batch": batch, "step": 1, "validating": False, "logger": None}
    return {"event": "log", **place, "metrics": {"loss": value.hex()}, "epoch_end": epoch_end}


def _compared(tmp_path: Path, run: list[dict[str, Any]], replay: list[dict[str, Any]]) -> Compared:
    original, own = _ledger(tmp_path / "run", *run), _ledger(tmp_path / "replay", *replay)
    return compare(original, own, fit=1, ranks=[0])


def test_steps_that_both_have_are_compared(tmp_path: Path) -> None:
    """Steps before the replay, after it, and those that the run has no line for, don't count."""
    found = _compared(tmp_path, [_batch(0), _batch(1), _batch(3)], [_batch(1), _batch(2)])
    assert found == Compared(num_steps=1)


def test_the_first_difference_is_named(tmp_path: Path) -> None:
    """It has the place, and both values in decimals."""
    found = _compared(tmp_path, [_batch(1), _batch(2)], [_batch(1), _batch(2, loss=0.25), _batch(3, loss=0.125)])
    assert found.difference is not None
    assert found.difference.place == "batch 2 of epoch 0"
    [value] = found.difference.values
    assert (value.name, value.expected, value.found) == ("loss", "0.5", "0.25")


def test_logged_values_are_compared_with_those_of_their_moment(tmp_path: Path) -> None:
    """What the run logs later at the same place is not missed, and a value that differs is found."""
    run = [_batch(1), _log(2, 0.5), _log(2, 0.75, epoch_end=True)]
    assert _compared(tmp_path, run, [_batch(1), _log(2, 0.5)]).difference is None
    other = tmp_path / "other"
    other.mkdir()
    assert _compared(other, run, [_batch(1), _log(2, 0.75)]).difference is not None


def test_an_order_that_the_run_does_not_know_is_not_compared(tmp_path: Path) -> None:
    """The ledger of a run that was switched off has no order; all else is compared."""
    assert _compared(tmp_path, [_batch(1, order=None)], [_batch(1)]) == Compared(num_steps=1)


def test_each_rank_is_compared_with_its_own_ledger(tmp_path: Path) -> None:
    """A difference on the second rank alone is found."""
    original, own = _ledger(tmp_path / "run", _batch(1)), _ledger(tmp_path / "replay", _batch(1))
    _ledger(tmp_path / "run.rank-1", _batch(1))
    _ledger(tmp_path / "replay.rank-1", _batch(1, loss=0.25))
    found = compare(original, own, fit=1, ranks=[0, 1])
    assert found.difference is not None
    assert found.difference.rank == 1
