"""`run --skip`: a batch that is left out is loaded but not trained, and the run stays exact, and says so."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.records.requests import SKIP_VARIABLE, text_of_skips
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.cli.checkpoints import call
from tests.data_sets import NoisyDataset
from tests.processes import Ended, run
from tests.rank_runs import for_ranks, rank_fit
from tests.runs import Fetches, Net, eight_batches, fit_eight, fit_net, make_trainer
from tests.scripts import autosaves, protected, tell, told


class Seen(Callback):
    """Records each batch that reaches a hook: epoch, number, steps before it, content."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name

    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: Any, batch_idx: int) -> None:
        content = batch.tolist() if isinstance(batch, Tensor) else None
        tell(self._directory, self._name, [trainer.current_epoch, batch_idx, trainer.global_step, content])


def skipping(*places: tuple[int, int], **options: Any) -> FaultTolerance:
    """Return a callback whose run leaves these batches out."""
    with pytest.MonkeyPatch.context() as patch:
        if places:
            patch.setenv(SKIP_VARIABLE, text_of_skips(places))
        return FaultTolerance(**options)


def seen(directory: Path, name: str, *skips: tuple[int, int]) -> list[list[Any]]:
    """Return what reaches the hooks in one run of one epoch."""
    ended = run(lambda: fit_net([skipping(*skips), Seen(directory, name)], directory / name, max_epochs=1))
    assert ended.exit_code == 0, ended.output
    return told(directory, name)


def test_the_others_are_the_same_samples_and_keep_their_numbers(tmp_path: Path) -> None:
    """The batches after the one left out have the same numbers and contents; the optimizer makes a step less."""
    whole, less = seen(tmp_path, "whole"), seen(tmp_path, "less", (0, 1))
    assert [(batch, content[0]) for _, batch, _, content in less][:1] == [(0, whole[0][3][0])]
    rows = {batch: [round(row[0], 1) for row in content] for _, batch, _, content in whole}
    assert [batch for _, batch, _, _ in less] == [0, 2, 3, 4]
    assert [step for _, _, step, _ in less] == [0, 1, 2, 3]
    assert all(len(rows[batch]) == len(content) for _, batch, _, content in less)


class Exact(LightningModule):
    """Its weight is the sum of the batches that reached it, each a power of two: any mistake is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -self.weight * batch[0].sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_epoch, "interval": "epoch"}}


@pytest.mark.parametrize(
    ("window", "skips", "num_steps"),
    [
        (1, [0], 5), (1, [5], 5), (2, [1], 3), (2, [0], 3), (2, [2, 3], 2), (3, [1, 2], 2), (3, [0, 2], 2),
        (4, [3, 5], 2), (4, [4, 5], 1),
    ],
)  # fmt: skip
def test_each_other_batch_is_trained_once(tmp_path: Path, window: int, skips: list[int], num_steps: int) -> None:
    """With any window of accumulated gradients, the gradients of all other batches reach the weight, each once."""
    data = DataLoader(TensorDataset(2.0 ** torch.arange(6, dtype=torch.float64)), batch_size=1)
    own = skipping(*((0, batch) for batch in skips))
    trainer = make_trainer([own], tmp_path, max_epochs=1, accumulate_grad_batches=window)
    module = Exact()
    trainer.fit(module, data)
    assert round(module.weight.item() * window, 9) == sum(2**batch for batch in range(6) if batch not in skips)
    assert trainer.global_step == num_steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5  # the epoch is over, whichever batch was its last


class Stream(IterableDataset[list[Tensor]]):
    """Six batches, each a power of two; nobody knows beforehand that they are six."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[torch.tensor(2.0**number, dtype=torch.float64)] for number in range(6)])


def fit_stream(directory: Path, skips: list[int], *faults: Callback, **options: Any) -> float:
    """Fit an epoch of the stream, with accumulated gradients, and return the weight."""
    often = {"train_time_interval": timedelta(microseconds=1)}  # also within a window
    own = skipping(*((0, batch) for batch in skips), **{**often, **options})
    trainer = make_trainer([own, *faults], directory, max_epochs=1, accumulate_grad_batches=4)
    module = Exact()
    trainer.fit(module, DataLoader(Stream(), batch_size=None))
    return round(module.weight.item() * 4, 9)


def test_no_gradient_gets_lost_without_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody knew that the batch left out is the last of its epoch: the gradients before it have no step."""
    with pytest.raises(NotExactError, match=r"batch 5 of epoch 0 ends a window of accumulated gradients"):
        fit_stream(tmp_path / "strict", [5])
    assert fit_stream(tmp_path / "lax", [5], strict=False) == 2**4 - 1
    assert "These gradients are lost, because strict is off." in caplog.text


@pytest.mark.parametrize("skips", [[4, 5], [5, 6, 7], [3], [0, 1, 2, 3]], ids=str)
def test_a_stream_loses_none_if_its_windows_are_known(tmp_path: Path, skips: list[int]) -> None:
    """A whole window, or all that it may still have, can be left out of a stream."""
    assert fit_stream(tmp_path, skips) == sum(2**batch for batch in range(6) if batch not in skips)


def test_a_request_within_a_window_may_come_too_late(tmp_path: Path) -> None:
    """The batches before it are trained, and wait for a step after it: it is refused, wherever the epoch ends."""
    killed = run(lambda: fit_stream(tmp_path, [], KillAt(3)))
    assert killed.exit_code == -signal.SIGKILL, killed.output
    late = run(lambda: fit_stream(tmp_path, [3]))
    assert "before batch 3 of epoch 0" in late.output
    assert late.exit_code == 1
    assert "batch 3 of epoch 0 ends a window of accumulated gradients" in late.output


def test_a_request_of_an_earlier_start_comes_in_time(tmp_path: Path) -> None:
    """After a resume within the window, its step is known to have been made."""
    options: dict[str, Any] = {"train_time_interval": None, "every_n_train_steps": 1}  # after the step, not after 3
    killed = run(lambda: fit_stream(tmp_path, [3], KillAt(4), **options))
    assert killed.exit_code == -signal.SIGKILL, killed.output
    resumed = run(lambda: tell(tmp_path, "weight", fit_stream(tmp_path, [], **options)))
    assert resumed.exit_code == 0, resumed.output
    assert "before batch 3 of epoch 0" in resumed.output
    assert told(tmp_path, "weight") == [2**6 - 1 - 2**3]


def test_an_epoch_whose_last_batch_is_left_out_validates(tmp_path: Path) -> None:
    """The validation run after the last batch of an epoch does not depend on that batch."""
    trainer = fit_net([skipping((0, 4))], tmp_path, max_epochs=1)
    assert "val_loss" in trainer.callback_metrics


def fit_skipping(callbacks: list[Callback], directory: Path) -> Any:
    """Fit two epochs."""
    return fit_net(callbacks, directory)


def test_killed_around_it_equals_undisturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed at each batch around the one left out equals the undisturbed run that leaves it out."""
    monkeypatch.setenv(SKIP_VARIABLE, "0:2,1:0,1:1")
    options = {"every_n_train_steps": 1}
    assert_resumes_exactly(fit_skipping, [KillAt(2), KillAt(1), KillAt(2), KillAt(1)], options=options)


def fit_accumulating(callbacks: list[Callback], directory: Path) -> Any:
    """Fit with accumulated gradients, workers, and validation within an epoch."""
    train = DataLoader(NoisyDataset(32), batch_size=4, shuffle=True, num_workers=2)
    more = {"accumulate_grad_batches": 3, "val_check_interval": 4}
    return fit_eight(callbacks, directory, train=train, **more)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [[3, 4], [5, 2], [6, 5]], ids=str)
def test_killed_within_a_window_equals_undisturbed(kills: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds with accumulated gradients, workers, and validation runs, wherever in the window it is."""
    monkeypatch.setenv(SKIP_VARIABLE, "0:2,0:3,0:7,1:4")
    options = {"train_time_interval": None, "every_n_train_steps": 1}
    assert_resumes_exactly(fit_accumulating, [KillAt(kill) for kill in kills], options=options)


@pytest.mark.slow
@for_ranks[0]
@for_ranks[1]
def test_two_ranks_leave_the_same_batch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """On each of two ranks the law holds."""
    monkeypatch.setenv(SKIP_VARIABLE, "0:1,0:7")
    options = {"every_n_train_steps": 1}
    assert_resumes_exactly(rank_fit(2), [KillAt(2), KillAt(8)], options=options, num_ranks=2)


class Broken(NoisyDataset):
    """One of its samples can't be loaded."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            torch.randn(2)
            raise OSError("sample 5 is broken")
        return super().__getitem__(index)


def fit_broken(callbacks: list[Callback], directory: Path, *, num_workers: int) -> Any:
    """Fit in order, so that batch 1 of each epoch holds the broken sample."""
    return fit_net(callbacks, directory, train=DataLoader(Broken(20), batch_size=4, num_workers=num_workers))


def fit_broken_alone(callbacks: list[Callback], directory: Path) -> Any:
    """Load in this process."""
    return fit_broken(callbacks, directory, num_workers=0)


def fit_broken_in_workers(callbacks: list[Callback], directory: Path) -> Any:
    """Load in two workers."""
    return fit_broken(callbacks, directory, num_workers=2)


@pytest.mark.parametrize("fit", [fit_broken_alone, pytest.param(fit_broken_in_workers, marks=pytest.mark.slow)])
def test_a_batch_that_can_not_be_loaded_is_left_out(fit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes past it, and resumes exactly right before and right after it."""
    monkeypatch.setenv(SKIP_VARIABLE, "0:1,1:1")
    options = {"every_n_train_steps": 1}
    assert_resumes_exactly(fit, [KillAt(2), KillAt(2), KillAt(3)], options=options)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_error_of_another_batch_is_raised(tmp_path: Path, num_workers: int) -> None:
    """Leaving one batch out hides no error of another one, which keeps its type and text."""
    with pytest.raises(OSError, match="sample 5 is broken"):
        fit_broken([skipping((0, 0))], tmp_path, num_workers=num_workers)


def script(directory: Path, *faults: Callback) -> Ended:
    """Run the script that is killed and run again."""
    return run(lambda: fit_net([protected(), *faults], directory))


def test_it_is_recorded_and_never_silent(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start says so, as do the autosave and the report, to the end."""
    monkeypatch.setenv(SKIP_VARIABLE, "0:1, 1:2, 9:9")
    first = script(tmp_path, KillAt(3))
    assert first.exit_code == -signal.SIGKILL
    assert "This run leaves out 3 batches (EPOCH:BATCH): 0:1,1:2,9:9." in first.output
    assert "Batch 1 of epoch 0 is left out" in first.output
    newest = autosaves(tmp_path)[-1]
    assert load_file(newest)["lightning_faulttolerant"]["skipped"] == {
        "done": [[0, 1]],
        "wanted": [[0, 1], [1, 2], [9, 9]],
    }
    inspected = call(capsys, "inspect", newest).out
    assert "batch 1 of epoch 0" in inspected
    assert "batch 2 of epoch 1" in inspected
    monkeypatch.delenv(SKIP_VARIABLE)
    second = script(tmp_path)  # no one repeats the request
    assert second.exit_code == 0, second.output
    assert "batch 1 of epoch 0 was left out" in second.output
    assert "Batch 2 of epoch 1 is left out" in second.output
    assert "--skip names batch 9 of epoch 9, which the run never reached" in second.output
    [directory] = (tmp_path / "fault_tolerance").iterdir()
    report = call(capsys, "report", directory).out
    assert "Batch 1 of epoch 0 was left out, by --skip." in report
    assert "Batch 2 of epoch 1 was left out, by --skip." in report
    told_as_json = json.loads(call(capsys, "report", directory, "--json").out)
    fits = [fit for process in told_as_json["chapters"][-1]["processes"] for fit in process["fits"]]
    assert [[(one["epoch"], one["batch"]) for one in fit["skipped"]] for fit in fits] == [[(0, 1)], [(0, 1), (1, 2)]]


def test_a_batch_that_is_trained_already_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that comes too late to leave a batch out warns, and records nothing."""
    assert script(tmp_path, KillAt(4)).exit_code == -signal.SIGKILL
    monkeypatch.setenv(SKIP_VARIABLE, "0:1")
    late = script(tmp_path)
    assert late.exit_code == 0, late.output
    assert "Batch 1 of epoch 0 was trained before this start, so it is not left out" in late.output
    assert "was left out" not in late.output.replace("is not left out", "")


@pytest.mark.filterwarnings("ignore:.*dataloader_iter.*:UserWarning")
def test_a_step_that_fetches_by_itself_refuses(tmp_path: Path) -> None:
    """Nobody else knows how many batches it takes: it is not silently trained."""
    with pytest.raises(RuntimeError, match="takes its batches from dataloader_iter"):
        fit_net([skipping((0, 1))], tmp_path, module=Fetches(), train=eight_batches())


def test_nothing_stays_after_the_fit(tmp_path: Path) -> None:
    """The loops have their own methods again."""
    trainer = fit_net([skipping((0, 1))], tmp_path, module=Net(), max_epochs=1)
    assert "_should_accumulate" not in vars(trainer.fit_loop.epoch_loop)


@pytest.mark.parametrize("text", ["3", "1:2.0", "-1:2", "1-2", "3:17;4:2"])
def test_what_names_no_batch_is_refused(text: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Anything but pairs of numbers from 0 is refused when the callback is made, and by the command."""
    monkeypatch.setenv(SKIP_VARIABLE, text)
    with pytest.raises(ValueError, match=SKIP_VARIABLE):
        FaultTolerance()
    assert call(capsys, "run", f"--skip={text}", "--", "true").status == 2
