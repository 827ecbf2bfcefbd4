"""What a ledger says of validation runs and evaluations, and what a drill requests in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.errors import DrillFault
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, SAVE_VARIABLE
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.data_sets import NoisyDataset
from tests.ledgers import FitLines, read_ledger, with_ledger
from tests.processes import run
from tests.runs import Net, make_trainer


class Evaluated(Net):
    """Returns a value or a prediction from each step."""

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        value = self.layers(batch).mean() + torch.rand(())
        self.log("value", value)
        return value

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self.layers(batch)


def loader(num_batches: int = 3) -> DataLoader[Tensor]:
    """Return a loader of this many batches."""
    return DataLoader(NoisyDataset(4 * num_batches), batch_size=4)


def run_script(
    directory: Path, *functions: str, loaders: Any = None, module: LightningModule | None = None
) -> tuple[list[Any], Trainer]:
    """Call functions of one trainer, with a ledger. Return what they return, and the trainer."""
    torch.manual_seed(1)
    own = with_ledger(directory / "ledger.jsonl", directory / "saves")
    trainer = make_trainer([own], directory, max_epochs=1, limit_train_batches=2, limit_val_batches=2)
    module = module or Evaluated()
    found = []
    for function in functions:
        train = [loader()] if function == "fit" else []
        found.append(getattr(trainer, function)(module, *train, loaders or loader()))
    return found, trainer


def fits_in(directory: Path) -> tuple[FitLines, ...]:
    """Return the fits and evaluations in the ledger."""
    return read_ledger(directory / "ledger.jsonl").fits


@pytest.mark.parametrize("switch", ["on", "off"])
def test_each_batch_and_the_end_of_every_evaluation_is_written(
    switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fits and evaluations share one count, batches one from 1, and the end has what was returned; so if all is off."""
    if switch == "off":
        monkeypatch.setenv(VARIABLE, "0")
    (_, validated, tested, predicted), trainer = run_script(tmp_path, "fit", "validate", "test", "predict")
    fits = fits_in(tmp_path)
    first = fits[0].number
    assert [(fit.number - first, fit.begun["function"]) for fit in fits] == list(
        enumerate(("fit", "validate", "test", "predict"))
    )
    assert [fit.begun["num_batches"] for fit in fits] == [2, 2, 3, 3]
    places = [
        [(line["epoch"], line["batch"], line["validation_batch"]) for line in fit.of("evaluated")] for fit in fits
    ]
    assert places == [
        [(0, 2, 1), (0, 2, 2)],
        *[[(0, 0, number + 1) for number in range(num)] for num in (2, 3, 3)],
    ]
    for fit in fits:
        assert all(line["content"] and line["rng"] and line["output"] for line in fit.of("evaluated"))
    for fit, results in zip(fits[1:3], (validated, tested), strict=True):
        assert fit.end is not None
        assert fit.end["returned"] == {name: value.hex() for name, value in results[0].items()}
        assert all(line["validating"] and line["validation_batch"] for line in fit.of("log"))
    end = fits[3].end
    assert end is not None
    assert end["returned"] == {"number of predictions": 3, "predictions": digest([predicted])}
    assert [line["output"] for line in fits[3].of("evaluated")] == [digest(prediction) for prediction in predicted]
    assert not {"validation_step", "test_step", "predict_step"} & vars(trainer.strategy).keys()
    assert [bool(fit.of("autosave")) for fit in fits] == [switch == "on"] * 4


def test_it_saves_inside_evaluations_where_a_drill_requests_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The autosaves that are requested come before the named batches, in a validation run and in a test."""
    monkeypatch.setenv(SAVE_VARIABLE, "1:0:2:1,2:0:0:2")
    ended = run(lambda: run_script(tmp_path, "fit", "test"))
    assert ended.exit_code == 0, ended.output
    fit, test = fits_in(tmp_path)
    saved = [[line["text"] for line in one.of("autosave")] for one in (fit, test)]
    assert "before batch 1 of the validation run after batch 2 of epoch 0" in saved[0]
    assert saved[1] == ["before batch 0 of test", "before batch 2 of test", "after the end of test"]
    assert [line.get("validation_batch") for line in test.of("autosave")] == [0, 2, None]


@pytest.mark.parametrize(("place", "num_done"), [("1:0:2:1", (1, 0)), ("2:0:0:2", (2, 2))])
def test_a_fault_is_raised_before_the_step_of_an_evaluation(
    place: str, num_done: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes before the named batch's step, in a validation run or in a test."""
    monkeypatch.setenv(FAULT_VARIABLE, f"{place}:start")

    def main() -> None:
        with pytest.raises(DrillFault):
            run_script(tmp_path, "fit", "test")

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    fits = fits_in(tmp_path)
    assert [len(fit.of("evaluated")) for fit in fits] == [num for num in num_done if num]
