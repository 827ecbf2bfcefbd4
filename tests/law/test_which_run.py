"""Which run a restart continues, and from what: several fits, several commands, several checkpoints."""

from __future__ import annotations

import argparse
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.damage import change_a_weight, cut_file
from tests.data_sets import NoisyDataset
from tests.processes import Script, run
from tests.runs import Net, fit_net
from tests.scripts import CountBatches, autosaves, protected, tell, told, weights

# Several fits in one script.


def folds(directory: Path, kill: tuple[int, int] | None) -> None:
    """Train three folds; the process is killed at a batch of one of them."""
    for fold in range(3):
        killing: list[Callback] = [KillAt(kill[1])] if kill is not None and kill[0] == fold else []
        count = CountBatches()
        rows = Subset(NoisyDataset(), [i for i in range(32) if i % 3 != fold])
        loader = DataLoader(rows, batch_size=4, shuffle=True, drop_last=True)
        trainer = fit_net([protected(), count, *killing], directory, train=loader, max_epochs=1)
        result = trainer.callback_metrics["val_loss"].item()
        tell(directory, "folds", [fold, count.num_batches, weights(trainer), result])


@pytest.mark.parametrize("fold", [0, 1, 2])
def test_killed_in_one_of_several_fits(fold: int, tmp_path: Path) -> None:
    """Finished fits are restored and train no batch again; the one that was killed continues."""
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    assert run(lambda: folds(tmp_path / "whole", None)).exit_code == 0
    assert run(lambda: folds(tmp_path / "killed", (fold, 3))).exit_code == -signal.SIGKILL
    ended = run(lambda: folds(tmp_path / "killed", None), seed=99)
    assert ended.exit_code == 0, ended.output
    whole, killed = told(tmp_path / "whole", "folds"), told(tmp_path / "killed", "folds")[fold:]
    assert [[f, *rest] for f, _, *rest in whole] == [[f, *rest] for f, _, *rest in killed]
    num_batches = [count for _, count, *_ in killed]
    assert num_batches[:fold] == [0] * fold
    assert 0 < num_batches[fold] < whole[fold][1]
    assert autosaves(tmp_path) == []


def fit_and_test(directory: Path, *, kill_in_test: bool) -> None:
    """Fit, then test."""
    count = CountBatches()
    trainer = fit_net([protected(), count], directory)
    tell(directory, "fit", [count.num_batches, weights(trainer)])
    if kill_in_test:
        os.kill(os.getpid(), signal.SIGKILL)
    tell(directory, "draw", torch.rand(2).tolist())


def test_killed_in_test_after_fit(tmp_path: Path) -> None:
    """A finished fit is not trained again, and the script continues from the same random states."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert run(lambda: fit_and_test(tmp_path / "whole", kill_in_test=False)).exit_code == 0
    run(lambda: fit_and_test(tmp_path / "killed", kill_in_test=True))
    assert run(lambda: fit_and_test(tmp_path / "killed", kill_in_test=False), seed=99).exit_code == 0
    [[first, before], [again, after]] = told(tmp_path / "killed", "fit")
    assert (first, again) == (10, 0)
    assert before == after == told(tmp_path / "whole", "fit")[0][1]
    assert told(tmp_path / "killed", "draw") == told(tmp_path / "whole", "draw")


def test_a_run_that_ended_normally_starts_over(tmp_path: Path) -> None:
    """When the process ends normally its autosaves are gone: the next run of the command is a new one."""

    def main() -> None:
        count = CountBatches()
        fit_net([protected(), count], tmp_path)
        tell(tmp_path, "batches", count.num_batches)

    assert run(main).exit_code == 0
    assert autosaves(tmp_path) == []
    assert run(main).exit_code == 0
    assert told(tmp_path, "batches") == [10, 10]


def test_more_epochs_continue_from_the_end(tmp_path: Path) -> None:
    """A finished fit that gets more epochs trains only those, like one long fit."""

    def main(max_epochs: int, kill: bool) -> None:
        count = CountBatches()
        trainer = fit_net([protected(), count], tmp_path / "short", max_epochs=max_epochs)
        tell(tmp_path, "short", [count.num_batches, weights(trainer)])
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)

    run(lambda: tell(tmp_path, "long", weights(fit_net([], tmp_path / "long", max_epochs=3))))
    run(lambda: main(2, kill=True))
    ended = run(lambda: main(3, kill=False), seed=99)
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "short")[1] == [5, told(tmp_path, "long")[0]]


def test_max_epochs_may_be_raised_in_the_middle(tmp_path: Path) -> None:
    """A killed fit continues with more epochs than it was started with."""
    run(lambda: tell(tmp_path, "long", weights(fit_net([], tmp_path / "long", max_epochs=3))))
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path / "short", max_epochs=2))
    ended = run(lambda: tell(tmp_path, "s", weights(fit_net([protected()], tmp_path / "short", max_epochs=3))), seed=99)
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "s") == told(tmp_path, "long")


# Several commands.


def test_other_arguments_are_another_run(tmp_path: Path) -> None:
    """A sweep in one directory does not mix: each command continues from its own autosaves."""

    def main(name: str, *faults: Callback) -> None:
        count = CountBatches()
        fit_net([protected(), count, *faults], tmp_path, max_epochs=1)
        tell(tmp_path, name, count.num_batches)

    run(lambda: main("one", KillAt(3)), arguments=("--lr=1",))
    run(lambda: main("two", KillAt(1)), arguments=("--lr=2",))
    assert run(lambda: main("one"), arguments=("--lr=1",)).exit_code == 0
    assert run(lambda: main("two"), arguments=("--lr=2",)).exit_code == 0
    assert told(tmp_path, "one") == [2]
    assert told(tmp_path, "two") == [4]


def test_same_run_started_twice_at_once_is_refused(tmp_path: Path) -> None:
    """The second process of the same run waits for its grace period, then refuses, and names the first."""

    class Wait(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                (tmp_path / "started").touch()
                while not (tmp_path / "go").exists():
                    time.sleep(0.01)

    first = Script(lambda: fit_net([protected(), Wait()], tmp_path))
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    second = run(lambda: fit_net([protected(grace_seconds=0.5)], tmp_path))
    (tmp_path / "go").touch()
    assert first.wait().exit_code == 0
    assert second.exit_code == 1
    assert "RunInUseError" in second.output
    assert f"{first.process_id}" in second.output
    assert os.uname().nodename in second.output


# Several checkpoints.


@pytest.fixture
def pretrained(tmp_path: Path) -> Path:
    """Return a checkpoint of another, shorter training."""
    path = tmp_path / "pretrained.ckpt"

    def main() -> None:
        trainer = fit_net([], tmp_path / "pretraining", max_epochs=1)
        trainer.save_checkpoint(path)

    assert run(main, seed=7).exit_code == 0
    return path


def finetune(directory: Path, path: Path, *faults: Callback) -> None:
    """Continue from a pretrained checkpoint."""
    trainer = fit_net([protected(), *faults], directory, ckpt_path=path)
    tell(directory, "weights", weights(trainer))


def test_pretrained_checkpoint_does_not_start_over(pretrained: Path, tmp_path: Path) -> None:
    """A fit that started from a checkpoint and was killed continues, instead of starting from it again."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    assert run(lambda: finetune(tmp_path / "whole", pretrained)).exit_code == 0
    assert run(lambda: finetune(tmp_path / "killed", pretrained, KillAt(2))).exit_code == -signal.SIGKILL
    ended = run(lambda: finetune(tmp_path / "killed", pretrained), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "before batch 2 of epoch 1" in ended.output
    assert told(tmp_path / "killed", "weights") == told(tmp_path / "whole", "weights")


def test_another_explicit_checkpoint_wins(pretrained: Path, tmp_path: Path) -> None:
    """Another explicit checkpoint than before sets the autosaves aside, and the log says so."""
    other = tmp_path / "other.ckpt"
    other.write_bytes(pretrained.read_bytes())
    (tmp_path / "run").mkdir()
    run(lambda: finetune(tmp_path / "run", pretrained, KillAt(2)))
    ended = run(lambda: finetune(tmp_path / "run", other), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "superseded" in ended.output
    assert "before batch 2" not in ended.output


@pytest.mark.filterwarnings("ignore:.*no last checkpoint available")
@pytest.mark.parametrize(("interval", "expected"), [(1, "before batch 3"), (100, "after the step of batch 1")])
def test_last_and_autosave_the_furthest_wins(interval: int, expected: str, tmp_path: Path) -> None:
    """With ckpt_path="last" the further one of our autosave and ModelCheckpoint's file wins."""

    def main(*faults: Callback) -> None:
        last = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True, every_n_train_steps=2)
        callbacks = [protected(every_n_train_steps=interval), last, *faults]
        fit_net(callbacks, tmp_path, enable_checkpointing=True, ckpt_path="last")

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    assert f"Resumed exactly {expected} of epoch 0" in ended.output


class ArgsNet(Net):
    """Has a hyperparameter that is not a plain value."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"args": argparse.Namespace(depth=3)})


@pytest.mark.filterwarnings("ignore:.*no last checkpoint available")
@pytest.mark.parametrize(
    ("module", "spoil", "reason"),
    [(ArgsNet, Path.exists, "weights_only=True"), (Net, cut_file, "damaged"), (Net, change_a_weight, "damaged")],
    ids=["refused", "cut", "changed"],
)
def test_last_that_cannot_be_taken_leads_to_the_autosave(module: Any, spoil: Any, reason: str, tmp_path: Path) -> None:
    """With ckpt_path="last" a damaged or refused file does not keep the run from its autosave."""

    def main(*faults: Callback) -> None:
        last = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True, every_n_train_steps=2)
        callbacks = [protected(every_n_train_steps=100), last, *faults]
        fit_net(callbacks, tmp_path, module=module(), enable_checkpointing=True, ckpt_path="last")

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    spoil(tmp_path / "checkpoints/last.ckpt")
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 0 of epoch 0" in ended.output
    [line] = [line for line in ended.output.splitlines() if "last.ckpt can't be used" in line]
    assert reason in line


@pytest.mark.filterwarnings("ignore:.*no last checkpoint available")
def test_last_that_is_refused_is_compared_all_the_same(tmp_path: Path) -> None:
    """If our autosave is further, starts do not report that the other file can't be used."""

    def main(*faults: Callback) -> None:
        last = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True, every_n_train_steps=2)
        fit_net([protected(), last, *faults], tmp_path, module=ArgsNet(), enable_checkpointing=True, ckpt_path="last")

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert "can't be used" not in ended.output


# Changed runs.

CHANGES = {
    "learning rate": lambda: {"learning_rate": 0.5},
    "split": lambda: {"train": DataLoader(Subset(NoisyDataset(40), range(1, 21)), batch_size=4, shuffle=True)},
    "data": lambda: {"train": DataLoader(TensorDataset(torch.zeros(20, 4)), batch_size=4, shuffle=True)},
    "batch size": lambda: {"train": DataLoader(Subset(NoisyDataset(40), range(20)), batch_size=10, shuffle=True)},
    "sampler": lambda: {
        "train": DataLoader(Subset(NoisyDataset(40), range(20)), batch_size=4, sampler=SubsetRandomSampler(range(20)))
    },
    "accumulation": lambda: {"accumulate_grad_batches": 2},
}


class TunedNet(Net):
    """Has its learning rate as an argument."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.learning_rate = learning_rate

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_run_is_refused_with_both_values(change: str, tmp_path: Path) -> None:
    """A change between two starts is named with both values; strict=False continues."""

    def main(*callbacks: Callback, learning_rate: float = 0.01, train: Any = None, **arguments: Any) -> None:
        train = train or DataLoader(Subset(NoisyDataset(40), range(20)), batch_size=4, shuffle=True)
        fit_net([*callbacks], tmp_path, train=train, module=TunedNet(learning_rate), **arguments)

    assert run(lambda: main(protected(), KillAt(3))).exit_code == -signal.SIGKILL
    refused = run(lambda: main(protected(), **CHANGES[change]()))
    assert refused.exit_code == 1
    assert "FingerprintMismatchError" in refused.output
    assert " when it was saved, " in refused.output
    assert autosaves(tmp_path) != []


class Probe(Callback):
    """Trains another model at the end of each epoch, and records its weights."""

    def __init__(self, directory: Path, callback: FaultTolerance | None = None) -> None:
        self.directory = directory
        self.callback = callback

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(trainer.current_epoch)
            probe = fit_net([self.callback or protected()], self.directory, max_epochs=1)
        tell(self.directory, "probes", [trainer.current_epoch, weights(probe)])


@pytest.mark.parametrize("is_shared", [False, True])
def test_fits_inside_a_fit(is_shared: bool, tmp_path: Path) -> None:
    """A fit in a callback of another fit is not counted: a resume trains it, and does not restore an earlier one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"

    def main(directory: Path, *faults: Callback) -> None:
        callback = protected()
        probe = Probe(directory, callback if is_shared else None)
        fit_net([*faults, callback, probe], directory, max_epochs=4)

    whole.mkdir(), killed.mkdir()
    ended = run(lambda: main(whole))
    assert ended.exit_code == 0, ended.output
    ended = run(lambda: main(killed, KillAt(12)))
    assert ended.exit_code == -signal.SIGKILL, ended.output
    ended = run(lambda: main(killed), seed=2)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 2 of epoch 2" in ended.output
    assert told(killed, "probes") == told(whole, "probes")


def test_module_whose_log_is_a_function(tmp_path: Path) -> None:
    """A function that a user has assigned to ``log`` does not belong to a module; the fit is still saved."""

    def main(*faults: Callback) -> None:
        module = Net()
        log = module.log
        module.log = lambda *args, **arguments: log(*args, **arguments)  # type: ignore[method-assign]
        fit_net([*faults, protected()], tmp_path, module=module)

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main, seed=2)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
