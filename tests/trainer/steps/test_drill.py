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
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, HOLD_VARIABLE, SAVE_VARIABLE
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


class Counts(Callback):
    """Counts the backward passes."""

    number = 0

    def on_after_backward(self, *_: Any) -> None:
        self.number += 1


@pytest.mark.parametrize(("hook", "passes", "steps"), [("start", 7, 7), ("step", 8, 7), ("end", 8, 8)])
def test_fault_is_raised_at_its_place(
    hook: str, passes: int, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised before the step, between backward pass and optimizer step, or after the hooks of the batch's end."""
    monkeypatch.setenv(FAULT_VARIABLE, f"1:1:2:{hook}")

    def main() -> None:
        counts, module = Counts(), Net()
        with pytest.raises(DrillFault, match=rf"1:1:2:{hook}.*The script is fine") as raised:
            fit(tmp_path, counts, module=module, val_check_interval=2)
        assert isinstance(raised.value, FaultToleranceError)
        assert (counts.number, module.trainer.global_step) == (passes, steps)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    assert places(tmp_path, "batch")[-1] == ((1, 2) if hook == "end" else (1, 1))


@pytest.mark.parametrize(
    "text", ["1:2:3", "1:2:3:middle", "a:2:3:start", "-1:2:3:end", "1:2:3:start:4", "1:0:2:3:step", "1:0:2:3:end"]
)
def test_place_that_is_none_is_an_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the given value and the valid ones; an evaluation has one hook."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    message = "must end with :start" if text.startswith("1:0:2:3") else "<fit>:<epoch>:<batch>:<hook>.*start, step, end"
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, max_epochs=1)


@pytest.mark.parametrize(("num_restarts", "batch"), [("0", 1), ("1", 2), ("2", None)])
def test_each_start_by_a_launcher_has_its_own_place(
    num_restarts: str, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that torchrun restarts keep their variables: each start takes its own place from the list."""
    monkeypatch.setenv(FAULT_VARIABLE, "1:0:1:start,1:0:2:end")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", num_restarts)
    place = read_fault()
    assert (None if place is None else place.batch[-1]) == batch


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


# The variable, its value, the batches in each evaluation's lines, and the ends of the texts of its autosaves.
REQUESTS = {
    "saves": (SAVE_VARIABLE, "1:0:1,1:0:2:1,2:0:0:2", [2, 3], ["batch 1 of epoch 0", "after batch 2 of epoch 0"]),
    "fault in validation": (FAULT_VARIABLE, "1:0:2:1:start", [1], []),
    "fault in a test": (FAULT_VARIABLE, "2:0:0:2:start", [2, 2], []),
    "of no fit": (FAULT_VARIABLE, "5:0:1:start", [2, 3], []),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_drill_requests_places(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autosaves and exceptions come before the named batches of a fit, a validation run in it, and a test."""
    variable, value, num_done, texts = REQUESTS[name]
    monkeypatch.setenv(variable, value)
    ended = run(lambda: run_script(tmp_path, "fit", "test"))
    assert ("DrillFault" in ended.output) == (ended.exit_code != 0) == name.startswith("fault")
    found = fits_in(tmp_path)
    assert [len(one.of("evaluated")) for one in found] == num_done
    saved = [line["text"] for line in found[0].of("autosave")]
    assert all(any(line.endswith(text) for line in saved) for text in texts), saved
    if name == "saves":
        tested = [line["text"] for line in found[1].of("autosave")]
        assert tested == ["before batch 0 of test", "before batch 2 of test", "after the end of test"]
