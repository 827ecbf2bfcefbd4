"""Which run a start continues, and from what: the situations in which users start scripts again."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import DataLoader, Subset

from lightning_faulttolerant import FlightRecorder
from lightning_faulttolerant.cli import main as command_line
from tests.damage import change_a_weight, cut_file
from tests.laws.cuts import Cut
from tests.laws.data_sets import HoldingDataset, NoisyDataset, StatefulSampler
from tests.laws.events import write
from tests.laws.features.starts import ChangesOnLoad, SetsOptimizer, SetsOthers, stopping
from tests.laws.rows import Net, Rows
from tests.laws.starts import Script, Start, one, slow_half, told, trained, whole
from tests.messages import plain
from tests.processes import wait_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:.*does not have a batch_sampler"),
    pytest.mark.filterwarnings("ignore:.*no last checkpoint available"),
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
TERM = signal.SIGTERM
AT = (0, 3)
TIMES = ("runs/2026-11-24_10-00", "runs/2026-11-24_11-30")


class Named(Net):
    values: Any = MappingProxyType({"lr": 0.1})

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({**self.values})


def named(**values: Any) -> type[Named]:
    """Return a module with these hyperparameters."""
    return type("Named", (Named,), {"values": values, "__module__": __name__})


def folds(*cuts: Cut | None, numbers: range = range(3), **more: Any) -> list[dict[str, Any]]:
    """Return a fit for each of some folds."""
    at = dict(enumerate(cuts))
    return [
        {"name": f"fold-{number}", "train": FOLDS[number], "cut": at.get(number), "max_epochs": 1, **more}
        for number in numbers
    ]


def fold(number: int) -> Callable[[], Any]:
    """Return what makes the loader of a fold."""
    rows = [i for i in range(32) if i % 3 != number]
    return lambda: DataLoader(Subset(NoisyDataset(), rows), batch_size=4, shuffle=True, drop_last=True)


FOLDS = [fold(number) for number in range(3)]


def evaluates(script: Script, *, is_killed: bool) -> None:
    """Fit, and be killed in what comes after it, or draw."""
    script.fit(seed=None)
    if is_killed and not script.is_plain:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)  # the order of files is that of their times, which have steps of up to 10 ms
    write(script.root / f"{script.name}-draw.jsonl", "draw", value=torch.rand(1).item())


def loses_its_directory(root: Path) -> None:
    """Remove the working directory."""
    (root / "gone").mkdir()
    os.chdir(root / "gone")
    (root / "gone").rmdir()


def shows_whole_reports(_: Path) -> None:
    """Print them."""
    logging.getLogger("lightning_faulttolerant").setLevel(logging.DEBUG)


def writes(name: str, text: str) -> Any:
    """Return the arguments of a start whose script has a content."""

    def write(root: Path) -> None:
        (root / name).mkdir(exist_ok=True)
        (root / name / "main.py").write_text(text)

    return {"path": f"{name}/main.py", "before": write}


MORE = lambda: Rows(28)  # noqa: E731
ALIKE: dict[str, Any] = {"path": "/checkout-2/train.py"}
HOOKS: dict[str, Any] = {"callbacks": lambda: [SetsOthers(), stopping()], "before": shows_whole_reports}
ACCEPT = "PL_FAULT_TOLERANT_ACCEPT"
SCENARIOS: dict[str, list[Start]] = {
    # Directories.
    "new directories": [one(AT, root="1"), one(Cut(at=(0, 5), by=TERM), root="2"), one(root="3")],
    "after a normal end": [one(), one(root="2"), one()],
    "directories by the time, no seed": [one(AT, seed=None, root=TIMES[0]), one(seed=None, root=TIMES[1])],
    "directories by hand, no seed": [one(AT, seed=None, root="a"), one(seed=None, root="b")],
    "directories by the time, other seed": [one(AT, root=TIMES[0]), one(seed=8, root=TIMES[1])],
    "other dirpath": [one(AT, options={"dirpath": "saves-1"}), one(options={"dirpath": "saves-2"})],
    "no working directory": [one(AT, before=loses_its_directory), one()],
    "registry that can't be written": [one(AT, environment={"PL_FAULT_TOLERANT_REGISTRY": "/dev/null/runs"}), one()],
    "under pytest": [
        one(AT, root="1", environment={"PL_FAULT_TOLERANT_REGISTRY": ""}),
        one(root="2", environment={"PL_FAULT_TOLERANT_REGISTRY": ""}),
    ],
    # Commands.
    "other arguments": [
        one(AT, argv=("--lr", "0.1")), one((0, 1), argv=("--lr", "0.2")), one(argv=("--lr", "0.1")),
        one(argv=("--lr", "0.2")),
    ],
    "other checkout": [one(AT, path="/checkout-1/train.py"), one(**ALIKE)],
    "other checkout, other data": [one(AT, path="/checkout-1/train.py"), one(**ALIKE, train=FOLDS[0])],
    "other checkout, other data of a data module": [
        one(AT, path="/checkout-1/train.py", data=MORE), one(**ALIKE, data=lambda: Rows(24)),
        one(path="/checkout-1/train.py", data=MORE),
    ],
    "other script": [one(AT), one(path="other.py"), one()],
    "script of the same name and content": [one(AT, **writes("one", "a")), one(**writes("two", "a"))],
    "script of the same name": [one(AT, **writes("one", "a")), one(**writes("two", "b"))],
    # Several fits.
    "folds in new directories": [Start(fits=folds(None, Cut(at=AT), root="1")), Start(fits=folds(root="2"))],
    "folds that are done are skipped": [
        Start(fits=folds(None, Cut(at=AT))), Start(fits=folds(numbers=range(1, 3))),
    ],
    "killed after the fit": [
        Start(fits=lambda script: evaluates(script, is_killed=True)),
        Start(fits=lambda script: evaluates(script, is_killed=False)),
    ],
    "more epochs": [one(AT, max_epochs=3), one((1, 1)), one(max_epochs=3)],
    # Changed runs.
    "other values": [one(AT, module=Named), one(module=named(lr=0.5)), one(module=Named)],
    "accepted once": [
        one(AT, module=named(start=0, o={"times": {"a": 0}, "rate": 1})),
        one(module=named(start=1, o={"times": {"a": 1}, "rate": 1})),
        one((0, 5), module=named(start=1, o={"times": {"a": 1}, "rate": 1}),
            environment={ACCEPT: "hyperparameters.o.times, hyperparameters.start"}),
        one(module=named(start=2, o={"times": {"a": 2}, "rate": 1})),
    ],
    "accepted name with the same letters": [
        one(AT, module=named(started=1)), one(module=named(started=2), environment={ACCEPT: "hyperparameters.start"}),
    ],
    "values that hooks set": [one((1, 2), module=SetsOptimizer, **HOOKS), one(module=SetsOptimizer, **HOOKS)],
    "other accumulation": [one(AT), one(accumulate_grad_batches=2)],
}  # fmt: skip


def saving(directory: str = "checkpoints", every: int = 1, **more: Any) -> dict[str, Any]:
    """Return the arguments of a fit that saves itself at each second step, and whose autosaves are as many."""
    named = {"every_n_train_steps": 2, "filename": "{step}", "save_top_k": -1}
    callbacks = lambda: ModelCheckpoint(directory, **(LAST if more.get("ckpt") == "last" else named))  # noqa: E731
    return {"callbacks": callbacks, "enable_checkpointing": True, "options": {"every_n_train_steps": every}, **more}


LAST: dict[str, Any] = {"save_last": True, "every_n_train_steps": 2}


def newest(root: Path) -> Path | None:
    """Return the file that a script's own restart logic finds."""
    found = sorted(root.glob("checkpoints/*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    return found[-1] if found else None


def pretrains(script: Script) -> None:
    """Save a checkpoint of a shorter training twice."""
    trainer = script.fit(name="pretraining", seed=5, root="pretraining", max_epochs=1)
    for name in ("pretrained.ckpt", "other.ckpt"):
        trainer.save_checkpoint(script.root / name)


def changes(change: Callable[[Path], object], name: str = "step=2.ckpt") -> Callable[[Path], object]:
    """Return what changes a file."""
    return lambda root: change(root / "checkpoints" / name)


def loses_our_part(path: Path) -> None:
    """Save a checkpoint again as Lightning alone would."""
    content = torch.load(path, weights_only=True)
    del content["lightning_faulttolerant"]
    torch.save(content, path)


BACK = {"auto_resume": False, "every_n_train_steps": 1}
PRETRAINS = Start(fits=pretrains, path="pretrain.py", environment={"PL_FAULT_TOLERANT_TRAINING": "0"}, prepares=True)
OTHER = one(prepares=True, path="other.py", seed=8, **saving("others"))
STEP_2 = "checkpoints/step=2.ckpt"
ARGS = named(args=argparse.Namespace(depth=3))
CHECKPOINTS: dict[str, list[Start]] = {
    "each in turn": [
        one(AT, **saving(every=100, ckpt=newest)), one((0, 5), **saving(ckpt=newest)),
        one((1, 1), **saving(every=100, ckpt=newest)), one(**saving(ckpt=newest)),
    ],
    "back to an earlier file": [
        one((1, 2), **saving()), one((0, 5), **saving(ckpt="checkpoints/step=4.ckpt") | {"options": BACK}),
        one(**saving(ckpt="checkpoints/step=4.ckpt")),
    ],
    "file of another run": [OTHER, one(AT, **saving()), one(**saving(ckpt="others/step=2.ckpt"))],
    "file of the user, changed by a hook": [
        one(prepares=True, path="other.py", **saving(module=ChangesOnLoad)), one(ckpt=STEP_2, module=ChangesOnLoad),
    ],
    "file without our part": [
        one(AT, **saving()),
        one(before=changes(loses_our_part), **saving(ckpt=STEP_2) | {"options": {"strict": False}}),
    ],
    "damaged file": [
        one(AT, **saving(every=100)), one(before=changes(change_a_weight), **saving(every=100, ckpt=newest)),
    ],
    "unreadable file": [one(AT, **saving()), one(before=changes(cut_file), **saving(ckpt=STEP_2))],
    "other pretrained": [PRETRAINS, one((1, 2), ckpt="pretrained.ckpt"), one(ckpt="other.ckpt")],
    "pretrained, then own file": [
        PRETRAINS, one((1, 3), **saving(every=100, ckpt="pretrained.ckpt")), one((1, 4), **saving(ckpt=newest)),
        one(**saving(ckpt="pretrained.ckpt")),
    ],
    "last is further": [one(AT, **saving(every=100, ckpt="last")), one(**saving(every=100, ckpt="last"))],
    "last is refused": [
        one(AT, **saving(every=100, ckpt="last", module=ARGS)), one(**saving(every=100, ckpt="last", module=ARGS)),
    ],
    "last is refused, autosave is further": [
        one(AT, **saving(ckpt="last", module=ARGS)), one(**saving(ckpt="last", module=ARGS)),
    ],
    "last is damaged": [
        one(AT, **saving(every=100, ckpt="last")),
        one(before=changes(cut_file, "last.ckpt"), **saving(every=100, ckpt="last")),
    ],
}  # fmt: skip


def sampled(num_workers: int = 0) -> DataLoader[Any]:
    """Return a loader over a data set with generators; its sampler keeps the position."""
    return DataLoader(HoldingDataset(), batch_size=4, sampler=StatefulSampler(), num_workers=num_workers)


MANUAL: dict[str, Any] = {"environment": {"PL_FAULT_TOLERANT_TRAINING": "manual"}}
POSITIONS = {
    "own sampler": [
        one(AT, train=sampled, **MANUAL),
        one((1, 2), train=sampled, **MANUAL),
        one(train=sampled, **MANUAL),
    ],
    "workers run ahead": [one(train=lambda: sampled(2), **MANUAL)],
}
SCENARIOS |= CHECKPOINTS | POSITIONS


@pytest.mark.parametrize("name", slow_half(SCENARIOS))
def test_which_run(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A start continues the interrupted run that it belongs to, begins its own, or is refused; and says so.

    With ``manual``, the user's objects keep the positions, and what keeps none is refused; nothing is wrapped.
    """
    assert told(tmp_path, SCENARIOS[name]) == snapshot


class Waits(Callback):
    """Waits in its second batch until it may continue."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            Path("started").touch()
            wait_for(Path("go").exists)


def call(*arguments: str) -> Start:
    """Return a start of the command line instead of the script."""
    return Start(fits=lambda _: sys.exit(command_line([*arguments])))


WAITING = one(more=[Waits()], root="1")


def test_run_in_use(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A second start waits, then refuses; elsewhere or with other arguments it trains beside; nothing is discarded."""
    script = Script(tmp_path)
    with script.running(WAITING) as first:
        wait_for((tmp_path / "started").exists)
        [name] = [path.name for path in tmp_path.glob("1/fault_tolerance/*")]
        short = {"grace_seconds": 0.2}
        starts = [one(root="1", options=short), one(root="2", options=short), one(root="1", argv=("--lr", "2"))]
        said = [f"({script.start(start)}) {script.said()}" for start in [*starts, call("list"), call("discard", name)]]
        (tmp_path / "go").touch()
        assert script.wait(first) == 0
    assert plain("\n".join(said), DIR=tmp_path, HOST=os.uname().nodename) == snapshot


def test_start_that_waits_continues(tmp_path: Path) -> None:
    """A second start waits until the first one, which gets a signal, has ended; then it continues it, anywhere."""
    script = Script(tmp_path)
    with script.running(WAITING) as first:
        wait_for((tmp_path / "started").exists)
        with script.running(one(root="2", options={"grace_seconds": 600.0})) as second:
            wait_for(lambda: "Waiting up to 600 s for it to end" in script.output())
            os.kill(first, TERM)
            (tmp_path / "go").touch()
            assert (script.wait(first), script.wait(second)) == (143, 0), script.output()
    assert trained(script.fits()["fit"], whole([one()])["fit"]) == "0:2 to 1:5, as uninterrupted, to the end"


RESUME_FROM = "PL_FAULT_TOLERANT_RESUME_FROM"


class Tuned(Named):
    """Has hyperparameters of each kind that a script changes."""

    values: Any = MappingProxyType({"lr": 0.01, "gamma": 0.9, "name": "first"})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=self.hparams.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Retuned(Tuned):
    """All of them are changed."""

    values: Any = MappingProxyType({"lr": 0.1, "gamma": 0.5, "name": "second"})


Retuned.__name__ = Retuned.__qualname__ = "Tuned"


def keeping() -> list[FlightRecorder]:
    """Return what keeps the states of steps 3, 6, 9, and 12."""
    return [FlightRecorder(None, keep_every=3)]


def branch(resume_from: str = "", cut: Any = None, **more: Any) -> Start:
    """Return a start of the script, as a branch if it is to begin somewhere; without a seed of its own."""
    environment = {RESUME_FROM: resume_from} if resume_from else {}
    return one(cut, environment=environment, companions=keeping, **{"module": Tuned, "seed": None, **more})


RETUNED: dict[str, Any] = {"module": Retuned, "max_epochs": 3}
BRANCHES: dict[str, list[Start]] = {
    "repeats its parent": [branch(), branch("3", (1, 1)), branch("3")],
    "changed": [branch(), branch("1:3", (1, 5), **RETUNED), branch("1:3", **RETUNED)],
    "step that is not kept": [branch(), branch("4")],
    "without a parent": [branch("3")],
    "plain start": [branch(), branch("3", (0, 5)), branch()],
}  # fmt: skip


@pytest.mark.parametrize("name", slow_half(BRANCHES))
def test_branches(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion) -> None:
    """A branch begins where it is told to, continues after a kill, and lists changes; a report has the tree."""
    text = told(tmp_path, BRANCHES[name])
    for directory in sorted(tmp_path.glob("runs/fault_tolerance/*")):
        command_line(["report", str(directory)])
    parts = ("changed:", "--", "(this run)")
    lines = [line for line in capsys.readouterr().out.splitlines() if any(part in line for part in parts)]
    lines = [re.sub(", [a-z ]+$", "", line) for line in lines if "Chapter" not in line]  # it may seem to run
    assert re.sub(r"-[0-9a-f]{8}\b", "-ID", plain("\n".join([text, *lines]))) == snapshot
