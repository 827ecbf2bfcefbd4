"""The exception that a drill requests: where it is raised, that it is raised once, and where the run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from lightning_faulttolerant.errors import DrillFault, FaultToleranceError
from lightning_faulttolerant.records.ledger import FAULT_VARIABLE, FaultPlace
from lightning_faulttolerant.trainer import process
from lightning_faulttolerant.trainer.steps.open_ledger import read_fault
from tests.ledgers import read_ledger, with_ledger
from tests.runs import Net, fit_net


@pytest.fixture(autouse=True)
def _first_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next fit the first one of this process."""
    monkeypatch.setattr(process, "num_fits", {})


class Noting(Callback):
    """Notes the hooks that a run calls."""

    def __init__(self) -> None:
        self.noted: list[str] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.noted = ["start"]

    def on_after_backward(self, *_: Any) -> None:
        self.noted.append("backward")

    def on_before_zero_grad(self, *_: Any) -> None:
        self.noted.append("zero grad")

    def on_train_batch_end(self, *_: Any) -> None:
        self.noted.append("end")


def fit_with(directory: Path, *callbacks: Callback, module: LightningModule | None = None, **arguments: Any) -> None:
    """Fit the same net from the same seed, with a ledger."""
    torch.manual_seed(1)
    own = with_ledger(directory / "ledger.jsonl", directory / "saves")
    fit_net([own, *callbacks], directory, module=module, **arguments)


HOOKS = {
    "start": ["start"],
    "step": ["start", "zero grad", "backward"],
    "end": ["start", "zero grad", "backward", "end"],
}


@pytest.mark.parametrize("hook", HOOKS)
def test_it_is_raised_at_its_place(hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised before the step, between backward pass and optimizer step, or after the hooks of the batch's end."""
    monkeypatch.setenv(FAULT_VARIABLE, f"1:1:2:{hook}")
    noting, module = Noting(), Net()
    with pytest.raises(DrillFault, match=rf"1:1:2:{hook}.*The script is fine") as raised:
        fit_with(tmp_path, noting, module=module)
    assert isinstance(raised.value, FaultToleranceError)
    assert noting.noted == HOOKS[hook]
    [fit] = read_ledger(tmp_path / "ledger.jsonl").fits
    last = fit.of("batch")[-1]
    assert (last["epoch"], last["batch"]) == ((1, 2) if hook == "end" else (1, 1))
    assert module.trainer.global_step == (8 if hook == "end" else 7)
    for owner in (module.trainer.strategy, module.trainer._logger_connector):
        assert not {"backward", "on_batch_end"} & vars(owner).keys()


@pytest.mark.parametrize("place", ["2:0:1:start", "1:5:0:start", "1:0:99:end"])
def test_a_place_that_no_fit_comes_by_is_passed_over(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing happens if the fit has another number or ends earlier."""
    monkeypatch.setenv(FAULT_VARIABLE, place)
    fit_with(tmp_path, max_epochs=1)
    assert read_ledger(tmp_path / "ledger.jsonl").fits[0].end is not None


@pytest.mark.parametrize("text", ["", "1:2:3", "1:2:3:middle", "a:2:3:start", "1:2:3:start:4", "-1:2:3:end"])
def test_a_place_that_is_none_is_an_error(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error shows the given value and the valid ones; an empty variable requests nothing."""
    monkeypatch.setenv(FAULT_VARIABLE, text)
    if text:
        with pytest.raises(ValueError, match=r"<fit>:<epoch>:<batch>:<hook>.*start, step, end"):
            fit_with(tmp_path, max_epochs=1)
    else:
        fit_with(tmp_path, max_epochs=1)


@pytest.mark.parametrize(
    ("batch", "hook", "is_in_evaluation", "text"),
    [((2, 3, 40), "end", False, "2:3:40:end"), ((2, 3, 40, 7), "start", True, "2:3:40:7:start")],
)
def test_a_place_is_read_as_it_is_written(batch: tuple[int, ...], hook: str, is_in_evaluation: bool, text: str) -> None:
    """The run reads exactly the place that the drill writes into the environment."""
    place = FaultPlace(batch=batch, hook=hook)
    assert (str(place), place.is_in_evaluation) == (text, is_in_evaluation)
    assert FaultPlace.parse(text) == place


@pytest.mark.parametrize(("num_restarts", "batch"), [("0", 1), ("1", 2), ("2", None)])
def test_each_start_by_a_launcher_has_its_own_place(
    num_restarts: str, batch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that torchrun restarts keep their variables: each start takes its own place from the list."""
    monkeypatch.setenv(FAULT_VARIABLE, "1:0:1:start,1:0:2:end")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", num_restarts)
    place = read_fault()
    assert (None if place is None else place.batch[-1]) == batch
