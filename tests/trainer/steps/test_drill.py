"""What a drill requests of a run: exceptions, autosaves, and a wait, in fits and in evaluations; what a ledger says."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import DrillFault, FaultToleranceError
from lightning_faulttolerant.records.ledger import (
    FAULT_VARIABLE,
    HOLD_VARIABLE,
    SAVE_VARIABLE,
    FaultPlace,
    places_in,
    places_text,
)
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.steps.digests import digest
from lightning_faulttolerant.trainer.steps.open_ledger import read_fault
from tests.data_sets import NoisyDataset
from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.processes import run
from tests.runs import Net, fit_net, make_trainer


def fits_in(directory: Path) -> tuple[FitLines, ...]:
    """Return the fits and evaluations in the ledger."""
    return read_ledger(directory / "ledger.jsonl").fits


def fit(directory: Path, *callbacks: Callback, **arguments: Any) -> None:
    """Fit the same net from the same seed, with a ledger, and with no regular autosave after the first."""
    torch.manual_seed(1)
    own = with_ledger(directory / "ledger.jsonl", directory / "saves", every_n_train_steps=1000)
    fit_net([own, *callbacks], directory, **arguments)


def places(directory: Path, kind: str) -> list[tuple[int, int]]:
    """Return the places of the lines of that kind."""
    return [(line["epoch"], line["batch"]) for line in fits_in(directory)[0].of(kind)]


class Noting(Callback):
    """Notes the hooks that a run calls."""

    noted: tuple[str, ...] = ()

    def on_train_batch_start(self, *_: Any) -> None:
        self.noted = ("start",)

    def on_after_backward(self, *_: Any) -> None:
        self.noted += ("backward",)

    def on_before_zero_grad(self, *_: Any) -> None:
        self.noted += ("zero grad",)

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted += ("end",)


HOOKS = {
    "start": ("start",),
    "step": ("start", "zero grad", "backward"),
    "end": ("start", "zero grad", "backward", "end"),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_fault_is_raised_at_its_place(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before the step, between backward pass and optimizer step, or after the hooks of the batch's end."""
    monkeypatch.setenv(FAULT_VARIABLE, f"1:1:2:{hook}")

    def main() -> None:
        noting, module = Noting(), Net()
        with pytest.raises(DrillFault, match=rf"1:1:2:{hook}.*The script is fine") as raised:
            fit(tmp_path, noting, module=module, val_check_interval=2)
        assert isinstance(raised.value, FaultToleranceError)
        assert noting.noted == HOOKS[hook]
        assert module.trainer.global_step == (8 if hook == "end" else 7)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    assert places(tmp_path, "batch")[-1] == ((1, 2) if hook == "end" else (1, 1))


@pytest.mark.parametrize("place", ["2:0:1:start", "1:5:0:start", "1:0:99:end", ""])
def test_place_that_no_fit_comes_by_is_passed_over(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing happens if the fit has another number or ends earlier, or if the variable is empty."""
    monkeypatch.setenv(FAULT_VARIABLE, place)
    assert run(lambda: fit(tmp_path, max_epochs=1)).exit_code == 0


@pytest.mark.parametrize(
    "text", ["1:2:3", "1:2:3:middle", "a:2:3:start", "-1:2:3:end", "1:2:3:start:4", "1:0:2:3:step", "1:0:2:3:end"]
)
def test_place_that_is_none_is_an_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the given value and the valid ones; an evaluation has one hook."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    message = "must end with :start" if text.startswith("1:0:2:3") else "<fit>:<epoch>:<batch>:<hook>.*start, step, end"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, max_epochs=1)


def test_places_are_read_as_they_are_written() -> None:
    """The run reads exactly what the drill writes into the environment; any other value is an error that shows it."""
    for text, batch in (("2:3:40:end", (2, 3, 40)), ("2:3:40:7:start", (2, 3, 40, 7))):
        place = FaultPlace.parse(text)
        assert (str(place), place.batch, place.is_in_evaluation) == (text, batch, len(batch) == 4)
    assert places_in(SAVE_VARIABLE, places_text([(1, 0, 2), (12, 3, 40)])) == [(1, 0, 2), (12, 3, 40)]
    for text in ("", "1:2", "1:2:3,", "1:2:x"):
        with pytest.raises(ValueError, match=r"PL_FAULT_TOLERANT_SAVE_AT must be <fit>:<epoch>:<batch>"):
            places_in(SAVE_VARIABLE, text)


@pytest.mark.parametrize(("num_restarts", "batch"), [("0", 1), ("1", 2), ("2", None)])
def test_each_start_by_a_launcher_has_its_own_place(
    num_restarts: str, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that torchrun restarts keep their variables: each start takes its own place from the list."""
    monkeypatch.setenv(FAULT_VARIABLE, "1:0:1:start,1:0:2:end")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", num_restarts)
    place = read_fault()
    assert (None if place is None else place.batch[-1]) == batch


def test_it_saves_before_the_batches_that_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves there, in the named fit, and otherwise only at the start and at the end."""
    monkeypatch.setenv(SAVE_VARIABLE, "1:0:2,1:1:1,2:0:3")
    ended = run(lambda: fit(tmp_path))
    assert ended.exit_code == 0, ended.output
    assert places(tmp_path, "autosave")[:3] == [(0, 0), (0, 2), (1, 1)]
    assert len(places(tmp_path, "autosave")) == 4


def test_it_waits_for_a_stop_before_the_batch_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch before it is finished, no later one has begun, and the stop is saved exactly there."""
    monkeypatch.setenv(HOLD_VARIABLE, "1:1:2")

    def main() -> None:
        def stop() -> None:
            while not fits_in(tmp_path) or (1, 1) not in places(tmp_path, "batch"):
                time.sleep(0.01)
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=stop, daemon=True).start()
        fit(tmp_path)

    ended = run(main)
    assert ended.exit_code == 143, ended.output
    assert places(tmp_path, "batch")[-1] == (1, 1)
    assert places(tmp_path, "autosave")[-1] == (1, 2)


class Evaluated(Net):
    """Returns a value or a prediction from each step."""

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = self.layers(batch).mean() + torch.rand(())
        self.log("value", value)
        return value

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)


def run_script(directory: Path, *functions: str) -> tuple[list[Any], Trainer]:
    """Call functions of one trainer, with a ledger. Return what they return, and the trainer."""
    torch.manual_seed(1)
    own = with_ledger(directory / "ledger.jsonl", directory / "saves")
    arguments: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    trainer = make_trainer([own], directory, max_epochs=1, **arguments)
    module, loader = Evaluated(), DataLoader(NoisyDataset(12), batch_size=4)
    loaders = {"fit": [loader, loader]}
    return [getattr(trainer, each)(module, *loaders.get(each, [loader])) for each in functions], trainer


@pytest.mark.parametrize("switch", ["on", "off"])
def test_each_batch_and_the_end_of_every_evaluation_is_written(
    switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits and evaluations share one count, batches one from 1, and the end has what was returned; so if all is off.

    The sanity check is left out: its batches are run again at each start.
    """
    if switch == "off":
        monkeypatch.setenv(VARIABLE, "0")
    functions = ("fit", "validate", "test", "predict")
    (_, validated, tested, predicted), _ = run_script(tmp_path, *functions)
    fits = fits_in(tmp_path)
    assert [(one.number - fits[0].number, one.begun["function"]) for one in fits] == list(enumerate(functions))
    assert [one.begun["num_batches"] for one in fits] == [2, 2, 3, 3]
    found = [[(line["batch"], line["validation_batch"]) for line in one.of("evaluated")] for one in fits]
    assert found == [[(2, 1), (2, 2)], *[[(0, number + 1) for number in range(num)] for num in (2, 3, 3)]]
    for one in fits:
        assert all(line["content"] and line["rng"] and line["output"] for line in one.of("evaluated"))
    ends = [one.end["returned"] for one in fits[1:] if one.end is not None]
    assert ends[:2] == [{n: v.hex() for n, v in results[0].items()} for results in (validated, tested)]
    assert ends[2:] == [{"number of predictions": 3, "predictions": digest([predicted])}]
    assert [line["output"] for line in fits[3].of("evaluated")] == [digest(prediction) for prediction in predicted]
    assert [bool(one.of("autosave")) for one in fits] == [switch == "on"] * 4


def test_it_saves_inside_evaluations_where_a_drill_requests_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The autosaves that are requested come before the named batches, in a validation run and in a test."""
    monkeypatch.setenv(SAVE_VARIABLE, "1:0:2:1,2:0:0:2")
    ended = run(lambda: run_script(tmp_path, "fit", "test"))
    assert ended.exit_code == 0, ended.output
    saved = [[line["text"] for line in one.of("autosave")] for one in fits_in(tmp_path)]
    assert "before batch 1 of the validation run after batch 2 of epoch 0" in saved[0]
    assert saved[1] == ["before batch 0 of test", "before batch 2 of test", "after the end of test"]


@pytest.mark.parametrize(("place", "num_done"), [("1:0:2:1", [1]), ("2:0:0:2", [2, 2])])
def test_a_fault_is_raised_before_the_step_of_an_evaluation(
    place: str, num_done: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes before the named batch's step, in a validation run or in a test."""
    monkeypatch.setenv(FAULT_VARIABLE, f"{place}:start")
    assert "DrillFault" in run(lambda: run_script(tmp_path, "fit", "test")).output
    assert [len(one.of("evaluated")) for one in fits_in(tmp_path)] == num_done
