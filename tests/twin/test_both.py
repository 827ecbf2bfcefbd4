"""One callback for Trainers of both packages, in any order of imports, without loading the unused package."""

from __future__ import annotations

import copy
import functools
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch

import tests.twin.translated  # noqa: F401 - it imports pytorch_lightning
from lightning_faulttolerant import AtomicCheckpointIO, FaultTolerance, ResumeReport
from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from lightning_faulttolerant.trainer import bases
from lightning_faulttolerant.trainer.process import VARIABLE
from tests import runs
from tests.harness.bare import Started, Starter, outer_variables, starter
from tests.processes import run

pytorch_lightning: Any = sys.modules["pytorch_lightning"]
twin_runs: Any = __import__("twin_tests.runs", fromlist=["runs"])
LIGHTNING, OTHER = PACKAGES = ("lightning.pytorch", "pytorch_lightning")

SCRIPT = """
import os, signal, sys
{first}
import {package} as pl
import torch
{last}
from torch.utils.data import DataLoader

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Dropout(0.3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step == int(os.environ.get("AT", -1)):
            os.kill(os.getpid(), int(os.environ["SIGNUM"]))
        loss = self.layer(batch).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

if __name__ == "__main__":
    pl.seed_everything(1)
    net = Net()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = DataLoader(torch.arange(80.0).reshape(20, 4) / 80, batch_size=4, shuffle=True)
    pl.Trainer(accelerator="cpu", max_epochs=2, callbacks={callbacks}, **quiet{more}).fit(net, data)
    print("RESULT", [value.hex() for value in net.seen], [p.sum().item().hex() for p in net.parameters()])
    print("LOADED", [name for name in ("lightning", "pytorch_lightning") if name in sys.modules])
"""
MADE = "from lightning_faulttolerant import FaultTolerance\nmade = FaultTolerance(every_n_train_steps=1)"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Starter]:
    """Yield a starter of scripts: forked, from a process that has imported neither package."""
    with starter() as found:
        yield found


@pytest.fixture(scope="module")
def result_of_plain(scripts: Starter, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the output of the script without the callback, by package."""

    @functools.cache
    def result(package: str) -> str:
        script = tmp_path_factory.mktemp("plain") / "script.py"
        script.write_text(SCRIPT.format(first="", last="", package=package, callbacks="None", more=""))
        done = scripts.start(script)
        assert done.exit_code == 0, done.output
        return done.line("RESULT")

    return result


def start_as_users(script: Path, **environment: str) -> Started:
    """Run a script in its directory, in a separate process."""
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env={**outer_variables(), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return Started(exit_code=done.returncode, output=done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("order", ["first", "last", "single", "variable"])
def test_script_of_either_package(
    package: str, order: str, tmp_path: Path, scripts: Starter, result_of_plain: Callable[[str], str]
) -> None:
    """Stopped and killed, it ends as the uninterrupted one does, and the other package is never imported.

    This also holds if the callback is created before the package is imported, if it is the only one, and by the
    variable: that case is started as a user does.
    """
    first, last = (MADE, "") if order == "first" else ("", "" if order == "variable" else MADE)
    callbacks = {"single": "made", "variable": "None"}.get(order, "[made]")
    text = SCRIPT.format(first=first, last=last, package=package, callbacks=callbacks, more="")
    script = tmp_path / "script.py"
    script.write_text(text)
    start = start_as_users if order == "variable" else scripts.start
    switch = {VARIABLE: "1"} if order == "variable" else {}
    stopped = start(script, **switch, AT="3", SIGNUM=str(int(signal.SIGTERM)))
    assert stopped.exit_code == 143, stopped.output
    if order != "variable":  # its first autosave is the only one of so short a run
        assert start(script, AT="7", SIGNUM=str(int(signal.SIGKILL))).exit_code == -signal.SIGKILL
    ended = start(script, **switch)
    assert ended.exit_code == 0, ended.output
    assert ended.line("RESULT") == result_of_plain(package), ended.output
    assert ended.line("LOADED") == f"LOADED {[package.partition('.')[0]]}"
    assert "Resumed exactly" in ended.output


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork"])
def test_ranks_that_lightning_makes(strategy: str, tmp_path: Path, scripts: Starter) -> None:
    """Two ranks in processes that Lightning starts, which get the callback, resume after one is killed."""
    script = tmp_path / "script.py"
    more = f', devices=2, strategy="{strategy}"'
    script.write_text(SCRIPT.format(first=MADE, last="", package=OTHER, callbacks="[made]", more=more))
    whole = scripts.start(script, PL_FAULT_TOLERANT_TRAINING="0")
    assert whole.exit_code == 0, whole.output
    assert scripts.start(script, AT="3", SIGNUM=str(int(signal.SIGKILL))).exit_code != 0
    ended = scripts.start(script)
    assert ended.exit_code == 0, ended.output
    assert ended.line("RESULT") == whole.line("RESULT"), ended.output
    assert ended.line("LOADED") == "LOADED ['pytorch_lightning']"
    assert "Resumed exactly" in ended.output


def test_callback_is_one_of_both_packages() -> None:
    """An instance, a copy, one from a pickle, and one of a subclass are callbacks of each package."""

    class Own(FaultTolerance):
        pass

    made = Own(every_n_train_steps=3)
    plain = FaultTolerance()
    for one in (made, copy.deepcopy(made), plain, pickle.loads(pickle.dumps(plain)), KillAt(1)):
        assert isinstance(one, lightning.pytorch.Callback)
        assert isinstance(one, pytorch_lightning.Callback)
    assert isinstance(copy.deepcopy(made), Own)


@pytest.mark.parametrize("helpers", [runs, twin_runs], ids=PACKAGES)
def test_checkpoint_io_of_both_packages(helpers: Any, tmp_path: Path) -> None:
    """A Trainer of each package accepts `AtomicCheckpointIO`, and loads what it writes."""
    plugin = AtomicCheckpointIO()
    trainer = helpers.fit_net([], tmp_path, plugins=[plugin], max_epochs=1)
    assert trainer.strategy.checkpoint_io is plugin
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    again = helpers.fit_net([], tmp_path, ckpt_path=tmp_path / "saved.ckpt", max_epochs=2)
    assert again.global_step == 10


def test_two_fits_of_two_packages_in_one_process(tmp_path: Path) -> None:
    """A script with a fit of each package, killed in the second, skips the first and continues the second.

    The two are numbered together, and one instance of the callback serves both.
    """
    ends: list[list[str]] = []

    def main(at: int | None) -> None:
        callback = FaultTolerance(tmp_path / "runs", run_id="both", every_n_train_steps=1)
        for number, helpers in enumerate((runs, twin_runs)):
            kills = [KillAt(at)] if at is not None and number == 1 else []
            trainer = helpers.fit_net([callback, *kills], tmp_path)
            weights = sum(p.double().sum().item() for p in trainer.lightning_module.parameters())
            report = callback.resume_report
            assert report is None or isinstance(report, ResumeReport)
            resumed = "new" if report is None else f"epoch {report.epoch}, batch {report.batch}"
            print(f"END {number} {weights.hex()} {resumed}")

    for at in (None, 4, None):
        ended = run(lambda at=at: main(at))  # type: ignore[misc]
        if at is not None:
            assert ended.exit_code == -signal.SIGKILL, ended.output
            assert sorted(path.name for path in (tmp_path / "runs" / "both").glob("fit-*")) == ["fit-1", "fit-2"]
        else:
            assert ended.exit_code == 0, ended.output
            ends.append([line for line in ended.output.splitlines() if line.startswith("END")])
    whole, again = ([line.split(maxsplit=3) for line in lines] for lines in ends)
    assert [weights for _, _, weights, _ in again] == [weights for _, _, weights, _ in whole]
    assert [resumed for *_, resumed in whole] == ["new", "new"]
    assert again[1][3] == "epoch 0, batch 4"
    assert not list((tmp_path / "runs").rglob("*.ckpt"))


def test_fit_of_one_package_inside_a_fit_of_the_other_is_a_part_of_it(tmp_path: Path) -> None:
    """An inner fit has neither a run nor a number, even if it gets the same callback."""
    callback = FaultTolerance(tmp_path / "runs", run_id="nested", every_n_train_steps=1)

    class Inner(lightning.pytorch.Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            twin_runs.fit_net([callback], tmp_path / "inner", max_epochs=1)
            found.append(sorted(path.name for path in (tmp_path / "runs").glob("*/fit-*")))

    found: list[list[str]] = []
    runs.fit_net([callback, Inner()], tmp_path, max_epochs=1)
    assert found == [["fit-1"]]


@pytest.mark.parametrize("helpers", [runs, twin_runs], ids=PACKAGES)
def test_variable_adds_it_to_a_trainer_of_each(helpers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the variable, each Trainer has its own callback; without it, none."""
    assert not [one for one in helpers.make_trainer([], tmp_path).callbacks if isinstance(one, FaultTolerance)]
    monkeypatch.setenv(VARIABLE, "1")
    first, second = helpers.make_trainer([], tmp_path), helpers.make_trainer([], tmp_path)
    [one], [other] = ([c for c in each.callbacks if isinstance(c, FaultTolerance)] for each in (first, second))
    assert one.is_from_environment
    assert one is not other


@pytest.mark.parametrize(("helpers", "root"), [(runs, "trainer"), (twin_runs, "twin")], ids=PACKAGES)
def test_trainer_is_served_by_its_own(helpers: Any, root: str, tmp_path: Path) -> None:
    """The parts that serve a Trainer are built with the classes of its package."""
    served = bases.served(helpers.make_trainer([], tmp_path))
    assert served.Session.__module__ == f"lightning_faulttolerant.{root}.session"


def test_other_trainers_and_old_versions_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An object that is not a Trainer, and a package before 2.5.6, are refused by name."""
    with pytest.raises(UnsupportedTrainerError, match=r"and pytorch_lightning, but this is a builtins\.int"):
        bases.served(1)
    monkeypatch.setattr(pytorch_lightning, "__version__", "2.5.5")
    with pytest.raises(UnsupportedTrainerError, match=r"needs pytorch_lightning 2\.5\.6 or newer"):
        bases.served(twin_runs.make_trainer([], tmp_path))
    assert bases.served(runs.make_trainer([], tmp_path))


def test_own_tests_of_a_module_of_the_other_package() -> None:
    """`assert_resumes_exactly` takes a fit of each package."""
    [cost] = assert_resumes_exactly(twin_runs.fit_net, [KillAt(3)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, 3)


@pytest.mark.parametrize("helpers", [runs, twin_runs], ids=PACKAGES)
def test_empty_hooks_are_those_of_both_packages(helpers: Any, tmp_path: Path) -> None:
    """With both packages as bases, the callback uses no hook of a batch: none is called, or is lost after a save."""
    seen: list[Any] = []

    class Saves(helpers.Callback):  # type: ignore[misc,name-defined]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append(callback.on_before_backward)
            trainer.save_checkpoint(tmp_path / "saved.ckpt")

    callback = FaultTolerance(tmp_path / "runs", every_n_train_steps=1)
    last = KillAt(100, hook="never")
    helpers.fit_net([Saves(), callback], tmp_path, max_epochs=1, limit_train_batches=2)
    assert seen == [None, None]
    assert bases.is_empty_hook(type(last).on_train_epoch_end, "on_train_epoch_end")
    assert not bases.is_empty_hook(type(last).on_train_batch_end, "on_train_batch_end")
    part = torch.load(tmp_path / "saved.ckpt", weights_only=True)["lightning_faulttolerant"]
    assert not part.get("inexact"), part["inexact"]
