"""A fit leaves nothing of ours on any object, and the package has no effect without training."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import run
from tests.runs import Net, fit_net, make_trainer
from tests.scripts import CountBatches, autosaves, protected, tell, told, weights


def ours(value: Any, seen: set[int] | None = None, depth: int = 0) -> list[str]:
    """Return the types of this package that are reachable from an object's attributes."""
    seen = set() if seen is None else seen
    if id(value) in seen or depth > 6:
        return []
    seen.add(id(value))
    found = [type(value).__qualname__] if type(value).__module__.startswith("lightning_faulttolerant") else []
    if isinstance(value, FaultTolerance):
        return []  # the callback itself is the user's
    children: list[Any] = []
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, (list, tuple, set)):
        children = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        children = list(vars(value).values())
    bases = [base.__name__ for base in type(value).__mro__ if base.__module__.startswith("lightning_faulttolerant")]
    return found + bases + [name for child in children for name in ours(child, seen, depth + 1)]


def handlers() -> dict[int, Any]:
    """Return all signal handlers."""
    return {signum: signal.getsignal(signum) for signum in signal.valid_signals()}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(num_workers: int, fails: bool, tmp_path: Path) -> None:
    """After a fit, even a failed one, loaders, data set, module, trainer, and handlers are as before."""

    class Fail(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            raise ZeroDivisionError

    def main() -> None:
        children = set(torch.multiprocessing.active_children())  # of the process that forked this one
        data = NoisyDataset(32 if num_workers else 20)
        train = DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)
        validation = CombinedLoader([DataLoader(NoisyDataset(8), batch_size=4)], "sequential")
        inner = validation.flattened[0]
        before = [dict(vars(loader)) for loader in (train, inner)], dict(vars(data)), handlers()
        module = Net()
        trainer = make_trainer([protected(), *([Fail()] if fails else [])], tmp_path)
        try:
            trainer.fit(module, train, validation)
        except ZeroDivisionError:
            assert fails
        assert validation.flattened[0] is inner
        assert ([dict(vars(loader)) for loader in (train, inner)], dict(vars(data)), handlers()) == before
        for thing in (train, validation, data, module, trainer):
            assert ours(thing) == [], thing
        assert set(torch.multiprocessing.active_children()) <= children

    ended = run(main)
    assert ended.exit_code == 0, ended.output


def test_two_fits_and_a_test_with_one_trainer(tmp_path: Path) -> None:
    """Two fits and a test give the same with the callback and without."""

    class Tested(Net):
        def test_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("test_loss", self.layers(batch).square().mean())

    def main(name: str, *callbacks: Callback) -> None:
        trainer = make_trainer([*callbacks], tmp_path / name, max_epochs=1)
        module, loader = Tested(), DataLoader(NoisyDataset(20), batch_size=4, shuffle=True)
        validation = DataLoader(NoisyDataset(8), batch_size=4)
        trainer.fit(module, loader, validation)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, loader, validation)
        results = trainer.test(module, DataLoader(NoisyDataset(8), batch_size=4), verbose=False)
        tell(tmp_path, name, [weights(trainer), results, torch.rand(1).item()])

    for name, callbacks in (("with", [protected()]), ("without", [])):
        ended = run(lambda name=name, callbacks=callbacks: main(name, *callbacks))
        assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "with") == told(tmp_path, "without")


def test_validate_and_test_touch_no_autosave(tmp_path: Path) -> None:
    """Between a crash and its resume, validate and test leave the autosaves alone."""
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))
    before = {path: path.stat().st_mtime_ns for path in autosaves(tmp_path)}
    assert before

    def main() -> None:
        trainer = make_trainer([protected()], tmp_path)
        trainer.validate(Net(), DataLoader(NoisyDataset(8), batch_size=4), verbose=False)

    assert run(main).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in autosaves(tmp_path)} == before


@pytest.mark.parametrize("argument", [{"fast_dev_run": True}, {"barebones": True}])
def test_no_effect_on_trial_runs(argument: dict[str, Any], tmp_path: Path) -> None:
    """A fast_dev_run or a barebones run saves nothing."""

    def main() -> None:
        arguments = {} if "fast_dev_run" in argument else dict.fromkeys(["log_every_n_steps"], None)
        fit_net([protected()] if "fast_dev_run" in argument else [], tmp_path, **{**arguments, **argument})

    if "barebones" in argument:
        pytest.importorskip("lightning")
    assert run(main).exit_code in (0, 1)
    assert autosaves(tmp_path) == []


class TunedNet(Net):
    """Has the attributes that the finders need."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.batch_size = 4

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(64), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(8), batch_size=4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("finder", ["learning rate", "batch size"])
def test_finders_find_the_same(finder: str, tmp_path: Path) -> None:
    """Tuner and finder callbacks give the same results with the callback and without, and do not resume."""

    def main(name: str, *callbacks: Callback) -> None:
        module = TunedNet()
        trainer = make_trainer([*callbacks], tmp_path / name, max_epochs=1)
        if finder == "learning rate":
            Tuner(trainer).lr_find(module, num_training=20)
        else:
            Tuner(trainer).scale_batch_size(module, max_trials=2, steps_per_trial=2)
        tell(tmp_path, name, [module.lr, module.batch_size])
        trainer.fit(module)
        tell(tmp_path, name, weights(trainer))

    for name, callbacks in (("with", [protected()]), ("without", [])):
        ended = run(lambda name=name, callbacks=callbacks: main(name, *callbacks))
        assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "with") == told(tmp_path, "without")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("finder", ["learning rate", "batch size"])
def test_a_run_with_a_finder_among_its_callbacks_resumes(finder: str, tmp_path: Path) -> None:
    """A run with a finder among its callbacks, killed and run again, resumes from its autosave as if uninterrupted."""

    def main(name: str, *faults: Callback) -> None:
        finders = {
            "learning rate": lambda: LearningRateFinder(num_training_steps=20),
            "batch size": lambda: BatchSizeFinder(max_trials=2, steps_per_trial=2, init_val=4),
        }
        trainer = make_trainer([finders[finder](), protected(), *faults], tmp_path / name, max_epochs=1)
        trainer.fit(TunedNet())
        tell(tmp_path, name, weights(trainer))

    assert run(lambda: main("whole")).exit_code == 0
    assert run(lambda: main("killed", KillAt(2))).exit_code == -signal.SIGKILL
    ended = run(lambda: main("killed"), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch" in ended.output
    assert told(tmp_path, "killed") == told(tmp_path, "whole")


def test_environment_variable_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged script resumes exactly if the environment switches the package on."""
    monkeypatch.setenv("PL_FAULT_TOLERANT_TRAINING", "1")

    def main(name: str, *callbacks: Callback) -> None:
        trainer = fit_net([CountBatches(), *callbacks], tmp_path / name)
        tell(tmp_path, name, weights(trainer))

    assert run(lambda: main("whole")).exit_code == 0
    assert run(lambda: main("killed", KillAt(2, signum=signal.SIGTERM))).exit_code == 143
    ended = run(lambda: main("killed"), seed=99)
    assert "before batch 3 of epoch 0" in ended.output
    assert told(tmp_path, "killed") == told(tmp_path, "whole")


def test_second_sigint_stops_at_once(tmp_path: Path) -> None:
    """After a second Ctrl-C no batch is finished; the exit code is 130."""

    class Interrupt(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
                tell(tmp_path, "after", copy.copy(batch_idx))

    assert run(lambda: fit_net([protected(), Interrupt()], tmp_path)).exit_code == 130
    assert told(tmp_path, "after") == []


def test_no_code_after_fit_runs_after_a_stop(tmp_path: Path) -> None:
    """A stop ends the process: the script does not continue as if training were finished."""

    def main() -> None:
        fit_net([protected(), KillAt(2, signum=signal.SIGTERM)], tmp_path)
        tell(tmp_path, "after", 1)

    assert run(main).exit_code == 143
    assert told(tmp_path, "after") == []


@pytest.mark.parametrize("hook", ["on_train_epoch_end", "on_train_end", "on_fit_end"])
def test_stop_signal_when_the_fit_is_all_but_over(hook: str, tmp_path: Path) -> None:
    """A stop after the last batch ends the process too; the fit is finished, and is not trained again."""

    class Late(Callback):
        def _strike(self, name: str) -> None:
            if name == hook:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_train_epoch_end(self, *_: Any) -> None:
            self._strike("on_train_epoch_end")

        def on_train_end(self, *_: Any) -> None:
            self._strike("on_train_end")

    def main(*faults: Callback) -> None:
        count = CountBatches()
        trainer = fit_net([protected(), count, *faults], tmp_path, max_epochs=1)
        if hook == "on_fit_end" and faults:
            os.kill(os.getpid(), signal.SIGTERM)  # Lightning's and our handlers are gone: the process just ends
        tell(tmp_path, "ended", [count.num_batches, weights(trainer)])

    stopped = run(lambda: main(Late()))
    assert stopped.exit_code == (143 if hook != "on_fit_end" else -signal.SIGTERM), stopped.output
    assert autosaves(tmp_path) != []
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "ended")[-1][0] == 0
