"""What a drill requests of a run: exceptions and autosaves, in fits and in evaluations; and what its ledger says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import DrillFault
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, SAVE_VARIABLE
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Net
from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.processes import run
from tests.runs import fit_net, make_trainer


def fits_in(directory: Path) -> list[FitLines]:
    """Return the fits and evaluations in the ledger."""
    return read_ledger(directory / "ledger.jsonl")


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
        own = with_ledger(tmp_path / "ledger.jsonl", tmp_path / "saves")
        with pytest.raises(DrillFault, match=rf"1:1:2:{hook}.*The script is fine"):
            fit_net([own, counts], tmp_path, module=module, val_check_interval=2)
        assert (counts.number, module.trainer.global_step) == (passes, steps)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    last = fits_in(tmp_path)[0].of("batch")[-1]
    assert (last["epoch"], last["batch"]) == ((1, 2) if hook == "end" else (1, 1))


@pytest.mark.parametrize("text", ["1:2:3", "1:2:3:middle", "a:2:3:start", "-1:2:3:end", "1:2:3:start:4", "1:0:2:3:end"])
def test_place_that_is_none_is_an_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the given value and the valid ones; an evaluation has one hook."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    message = "must end with :start" if text == "1:0:2:3:end" else "<fit>:<epoch>:<batch>:<hook>.*start, step, end"
    with pytest.raises(ValueError, match=message):
        fit_net([with_ledger(tmp_path / "ledger.jsonl", tmp_path / "saves")], tmp_path, max_epochs=1)


class Evaluated(Net):
    """Returns a value or a prediction from each step."""

    def test_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        value = self.layers(batch).mean() + torch.rand(())
        self.log("value", value)
        return value

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)


def run_script(directory: Path, *functions: str) -> list[Any]:
    """Call functions of one trainer, with a ledger. Return what they return."""
    own = with_ledger(directory / "ledger.jsonl", directory / "saves")
    arguments: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 2}
    trainer = make_trainer([own], directory, max_epochs=1, **arguments)
    module, loader = Evaluated(), DataLoader(NoisyDataset(12), batch_size=4)
    loaders = {"fit": [loader, loader]}
    return [getattr(trainer, each)(module, *loaders.get(each, [loader])) for each in functions]


def test_each_batch_and_the_end_of_every_evaluation_is_written(tmp_path: Path) -> None:
    """Fits and evaluations share one count, batches one from 1, and the end has what was returned.

    The sanity check is left out: its batches are run again at each start.
    """
    functions = ("fit", "validate", "test", "predict")
    _, validated, tested, predicted = run_script(tmp_path, *functions)
    fits = fits_in(tmp_path)
    assert [(one[0]["fit"] - fits[0][0]["fit"], one[0]["function"]) for one in fits] == list(enumerate(functions))
    assert [one[0]["num_batches"] for one in fits] == [2, 2, 3, 3]
    found = [[(line["batch"], line["validation_batch"]) for line in one.of("evaluated")] for one in fits]
    assert found == [[(2, 1), (2, 2)], *[[(0, number + 1) for number in range(num)] for num in (2, 3, 3)]]
    for one in fits:
        assert all(line["content"] and line["rng"] and line["output"] for line in one.of("evaluated"))
    ends = [one.end["returned"] for one in fits[1:]]
    assert ends[:2] == [{n: v.hex() for n, v in results[0].items()} for results in (validated, tested)]
    assert ends[2:] == [{"number of predictions": 3, "predictions": digest([predicted])}]
    assert [line["output"] for line in fits[3].of("evaluated")] == [digest(prediction) for prediction in predicted]


# The variable, its value, the batches in each evaluation's lines, and places of autosaves.
REQUESTS = {
    "saves": (SAVE_VARIABLE, "1:0:1,1:0:2:1,2:0:0:2", [2, 3], {"before batch 1 of epoch 0", "before batch 2 of test"}),
    "fault in validation": (FAULT_VARIABLE, "1:0:2:1:start", [1], set()),
    "fault in a test": (FAULT_VARIABLE, "2:0:0:2:start", [2, 2], set()),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_a_drill_requests_places(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Autosaves and exceptions come before the named batches of a fit, a validation run in it, and a test."""
    variable, value, num_done, saved = REQUESTS[name]
    monkeypatch.setenv(variable, value)
    ended = run(lambda: run_script(tmp_path, "fit", "test"))
    assert ("DrillFault" in ended.output) == (ended.exit_code != 0) == name.startswith("fault")
    found = fits_in(tmp_path)
    assert [len(one.of("evaluated")) for one in found] == num_done
    texts = {line["text"] for one in found for line in one.of("autosave")}
    assert saved <= texts
    assert name != "saves" or any("after batch 2 of epoch 0" in text for text in texts)
