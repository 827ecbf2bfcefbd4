"""With ``strict=False`` a run that can't be followed has the right number of steps, and reports what is not exact."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt
from tests.data_sets import CountingSampler, NoisyDataset, Unsized
from tests.groups import run_group
from tests.processes import run
from tests.runs import Net, fit_net, make_trainer


class FromTheSystem(Sampler[int]):
    """Shuffles by numbers from the operating system, which can't be restored."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(32), key=lambda _: os.urandom(8)))


class Lost(Sampler[list[int]]):
    """Does the same, in batches of an object that a checkpoint can't contain."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        order = iter(FromTheSystem())
        return iter([Indices(next(order) for _ in range(4)) for _ in range(8)])


class Indices(list[int]):
    """A list subclass."""


LOADERS: dict[str, Callable[[], Any]] = {
    "refused at its start": lambda: DataLoader(NoisyDataset(), batch_size=4, in_order=False),
    "refused, and without a length": lambda: Unsized(NoisyDataset(), batch_size=4, in_order=False),
    "a refused replay": lambda: DataLoader(NoisyDataset(), batch_size=4, sampler=CountingSampler()),
    "a refused replay, and without a length": lambda: Unsized(NoisyDataset(), batch_size=4, sampler=CountingSampler()),
    "drawn by the system": lambda: DataLoader(NoisyDataset(), batch_size=4, sampler=FromTheSystem(), num_workers=2),
    "objects drawn by the system": lambda: DataLoader(NoisyDataset(), batch_sampler=Lost(), num_workers=2),
}


FAST = ("refused, and without a length", "a refused replay")


class Steps(Callback):
    """Records each step and each validation, with its place."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, idx: int) -> None:
        with self.path.open("a") as file:
            file.write(f"step {trainer.current_epoch} {idx} {trainer.is_last_batch}\n")

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        with self.path.open("a") as file:
            file.write(f"validation after {trainer.global_step}\n")


def steps(directory: Path, make: Callable[[], Any], *kills: int) -> Any:
    """Return the records of a run that is killed at these batches, and the last process's outcome."""

    def main(faults: list[Any]) -> None:
        ours = FaultTolerance(directory, run_id="run", every_n_train_steps=1, strict=False)
        callbacks = [ours, *faults, Steps(directory / "steps.txt")]
        arguments: dict[str, Any] = {"val_check_interval": 3, "check_val_every_n_epoch": None}
        fit_net(callbacks, directory, train=make(), num_sanity_val_steps=0, **arguments)
        if ours.resume_report is not None:
            (directory / "report.txt").write_text(str(ours.resume_report))

    directory.mkdir()
    for kill in kills:
        assert run(lambda kill=kill: main([KillAt(kill)])).exit_code == -signal.SIGKILL
    ended = run(lambda: main([]))
    assert ended.exit_code == 0, ended.output
    return (directory / "steps.txt").read_text().splitlines(), ended


@pytest.mark.filterwarnings("ignore:.*number of training batches")
@pytest.mark.parametrize(
    ("name", "kill"),
    [
        *(pytest.param(name, 13, marks=() if name in FAST else pytest.mark.slow) for name in LOADERS),
        # In its first iteration the sampler that counts can be followed.
        *(pytest.param(name, 3, marks=pytest.mark.slow) for name in LOADERS if "replay" not in name),
    ],
)
def test_steps_and_validations_are_as_many(name: str, kill: int, tmp_path: Path) -> None:
    """The consumed batches are skipped; the report names each inexact part once."""
    expected, _ = steps(tmp_path / "whole", LOADERS[name])
    found, ended = steps(tmp_path / "killed", LOADERS[name], kill)
    assert found == expected
    assert len([line for line in found if line.startswith("step")]) == 16
    report = (tmp_path / "killed" / "report.txt").read_text()
    assert report.startswith("Resumed NOT EXACTLY")
    [reason] = [line for line in report.splitlines() if "NOT EXACT " in line]
    assert reason.removeprefix("  NOT EXACT ") in ended.output.replace(report, "")


def test_the_same_is_an_error_if_strict(tmp_path: Path) -> None:
    """With ``strict``, the default, such a resume is refused, and nothing is trained."""

    def main(*faults: Any) -> None:
        ours = FaultTolerance(tmp_path, run_id="run", every_n_train_steps=1)
        train = DataLoader(NoisyDataset(), batch_sampler=Lost())
        fit_net([ours, *faults], tmp_path, train=train, max_epochs=1)

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    ended = run(main)
    assert ended.exit_code != 0
    assert NotExactError.__name__ in ended.output
    assert "Lost yields other indices than before" in ended.output


class Counts(Net):
    """Counts its batches in a list, if it has one."""

    def __init__(self, *, has_list: bool) -> None:
        super().__init__()
        if has_list:
            self.counts = [0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if hasattr(self, "counts"):
            self.counts[0] += 1
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if hasattr(self, "counts"):
            self.counts[0] += 1
        super().validation_step(batch, batch_idx)


def fits(directory: Path, *faults: Callback, has_list: bool, strict: bool) -> str:
    """Return the output of a start that is killed if there is a fault."""

    def main() -> None:
        ours = FaultTolerance(directory, run_id="run", every_n_train_steps=1, strict=strict)
        fit_net([ours, *faults], directory, module=Counts(has_list=has_list), num_sanity_val_steps=0)
        print(ours.resume_report)

    ended = run(main)
    assert ended.exit_code == (-signal.SIGKILL if faults else 0), ended.output
    return ended.output


def validates(directory: Path, *faults: Callback, has_list: bool, strict: bool, in_worker: bool = False) -> str:
    """Do the same for a validation run of its own; the list is the module's, or that of a worker's data set."""

    def main() -> None:
        every = timedelta(microseconds=1)
        ours = FaultTolerance(directory, run_id="run", train_time_interval=every, strict=strict)
        loader = DataLoader(Seen(has_list=has_list and in_worker), batch_size=4, num_workers=int(in_worker))
        module = Counts(has_list=has_list and not in_worker)
        make_trainer([ours, *faults], directory).validate(module, loader, verbose=False)
        print(ours.resume_report)

    ended = run(main)
    assert ended.exit_code == (-signal.SIGKILL if faults else 0), ended.output
    return ended.output


class Seen(NoisyDataset):
    """May count what it has loaded."""

    def __init__(self, *, has_list: bool) -> None:
        super().__init__(40)
        if has_list:
            self.seen = [0]

    def __getitem__(self, index: int) -> Tensor:
        if hasattr(self, "seen"):
            self.seen[0] += 1
        return super().__getitem__(index)


class KillAtValidated(Callback):
    """Kills the process in a batch of a validation run."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_validation_batch_start(self, trainer: Trainer, module: LightningModule, *batch: Any) -> None:
        if batch[1] == self.batch:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders:UserWarning")
@pytest.mark.parametrize("kind", ["fit", "validate"])
def test_what_only_one_rank_loses_is_inherited(kind: str, tmp_path: Path) -> None:
    """The report of rank 0 says what another rank could not restore, at once and at each later start."""

    def start(*faults: Callback, loses: int | None = 1, strict: bool = True) -> str:
        def main(rank: int) -> None:
            module, ranks = Counts(has_list=rank != loses), {"devices": 2, "strategy": "ddp"}
            if kind == "fit":
                ours = FaultTolerance(tmp_path, run_id="run", every_n_train_steps=1, strict=strict)
                fit_net([ours, *faults], tmp_path, module=module, num_sanity_val_steps=0, **ranks)
                return
            ours = FaultTolerance(tmp_path, run_id="run", train_time_interval=timedelta(microseconds=1), strict=strict)
            trainer = make_trainer([ours, *faults], tmp_path, **ranks)
            trainer.validate(module, DataLoader(NoisyDataset(80), batch_size=4), verbose=False)

        return run_group(main, num_ranks=2, directory=tmp_path)[1]

    kills: list[Callback] = [KillAt(2), KillAt(1)] if kind == "fit" else [KillAtValidated(2), KillAtValidated(3)]
    place = "batch 2 of epoch 0" if kind == "fit" else "batch 2 of validate"
    start(kills[0], loses=None)
    output, _, _ = start(kills[1], strict=False).partition("--- rank 1")
    assert f"Resumed NOT EXACTLY before {place}" in output
    assert "Resumed exactly" not in output
    output, _, _ = start().partition("--- rank 1")
    line = rf"NOT EXACT since it resumed before {place}: without module\.counts: it no longer exists"
    assert len(re.findall(line, output)) == 1, output


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize(
    ("starts", "kills", "place"),
    [
        (fits, (KillAt(3), KillAt(3), KillAt(2)), "before batch 3 of epoch 0"),
        (validates, (KillAtValidated(3), KillAtValidated(6), KillAtValidated(8)), "before batch 3 of validate"),
    ],
)
def test_what_is_not_exact_is_inherited(
    starts: Callable[..., str], kills: tuple[Callback, ...], place: str, is_lost: bool, tmp_path: Path
) -> None:
    """Each later resume says since when the run is not exact, once; a run that lost nothing says nothing."""
    starts(tmp_path, kills[0], has_list=True, strict=True)
    starts(tmp_path, kills[1], has_list=not is_lost, strict=False)
    for faults in [kills[2:], ()]:
        output = starts(tmp_path, *faults, has_list=not is_lost, strict=True)
        report = output[output.rindex("Resumed ") :]
        line = rf"NOT EXACT since it resumed {place}: without module\.counts: it no longer exists"
        assert len(re.findall(line, report)) == is_lost, output
        assert report.startswith("Resumed NOT EXACTLY" if is_lost else "Resumed exactly"), output


@pytest.mark.parametrize("is_lost", [True, False])
def test_what_a_worker_of_an_evaluation_loses_is_in_the_report(is_lost: bool, tmp_path: Path) -> None:
    """A worker tells it only when it begins, after the report was printed."""
    validates(tmp_path, KillAtValidated(3), has_list=True, strict=False, in_worker=True)
    output = validates(tmp_path, has_list=not is_lost, strict=False, in_worker=True)
    report = output[output.rindex("Resumed ") :]
    assert ("NOT EXACT A worker continues without dataset.seen: it no longer exists" in report) == is_lost, output
    assert report.startswith("Resumed NOT EXACTLY" if is_lost else "Resumed exactly"), output
