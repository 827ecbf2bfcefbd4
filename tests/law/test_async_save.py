"""Autosaves in the background: the law holds for any end of the run during a write."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_faulttolerant.checkpoint.saving import BackgroundWriter
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.faults import Disk, is_in_background
from tests.processes import run
from tests.runs import Net, fit_eight
from tests.scripts import autosaves, protected, tell, told

BEHIND = {"async_save": True}
ALWAYS = {**BEHIND, "every_n_train_steps": 1}
_start = BackgroundWriter.start


class Held(Disk):
    """Holds each background write until `num_batches` more batches have begun, at most eight in all."""

    def __init__(self, num_batches: int) -> None:
        super().__init__()
        self.num_batches = num_batches
        self.num_begun = 0
        self.held_until = 0

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        super().setup(trainer, module, stage)

        def start(writer: BackgroundWriter, job: Callable[[], object]) -> None:
            self.held_until = min(self.num_begun + self.num_batches, 8)  # the batches begun by now don't count
            _start(writer, job)

        BackgroundWriter.start = start  # type: ignore[method-assign]

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        super().teardown(trainer, module, stage)
        BackgroundWriter.start = _start  # type: ignore[method-assign]

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.num_begun += 1

    def fsync(self, descriptor: int) -> None:
        while is_in_background() and self.num_begun < self.held_until:
            time.sleep(0.002)
        super().fsync(descriptor)


class KillInWrite(Disk):
    """Kills the process while the file in the background is written and not yet in place."""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class FullDisk(Disk):
    """Has no space left for background writes from then on."""

    def strike(self) -> None:
        self.at = self.num_calls + 1
        raise OSError(28, "No space left on device")


def fit_workers(num_workers: int, accumulate: int = 1) -> Any:
    """Return a fit whose training loader has `num_workers` workers."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        train = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_eight(callbacks, directory, train=train, accumulate_grad_batches=accumulate)

    return fit


# Each file takes two calls of fsync: the first while it is written, the second when it is in place.
@pytest.mark.parametrize(("num_workers", "accumulate", "at"), [(0, 1, (7, 13)), (2, 1, (7, 13)), (0, 3, (3, 5))])
def test_killed_in_the_middle_of_a_write(num_workers: int, accumulate: int, at: tuple[int, int]) -> None:
    """SIGKILL during a write costs the training since the previous autosave, in both epochs."""
    faults = [[KillInWrite(0.02, at=number)] for number in at]
    costs = assert_resumes_exactly(fit_workers(num_workers, accumulate), faults, options=ALWAYS)
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL] * 2
    places = [(cost.epoch, cost.batch) for cost in costs]
    # A resumed fit does not save the state that it has read, and waits for its first write.
    assert places == ([(0, 3), (1, 2)] if accumulate == 1 else [(0, 3), (1, 3)])


def test_error_of_a_write_that_is_not_the_disks_is_raised_at_the_next_boundary(tmp_path: Path) -> None:
    """An error in the package or the state ends the run at the next boundary, however late the next save is due."""

    class Notes(Disk):
        num_batches: int | None = None

        def strike(self) -> None:
            self.num_batches = 0
            raise ZeroDivisionError("in the thread")

        def on_train_batch_end(self, *_: Any) -> None:
            if self.num_batches is not None:
                self.num_batches += 1
                time.sleep(0.01)  # so that the thread can finish

        def on_exception(self, *_: Any) -> None:
            tell(tmp_path, "batches", self.num_batches)

    options = {"every_n_train_steps": 100}
    ended = run(lambda: fit_eight([protected(**BEHIND, **options), Notes(at=1)], tmp_path, max_epochs=10_000))
    assert ended.exit_code == 1
    assert "ZeroDivisionError: in the thread" in ended.output
    # Time decides whether the last boundary was captured; if so, it is saved now.
    assert re.search(r"ZeroDivisionError: the (last autosave, .*, stays|state .* is saved)\.", ended.output), (
        ended.output
    )
    [num_batches] = told(tmp_path, "batches")
    assert num_batches < 100  # the next save is due at 100, long after the next boundary
    assert all(load_file(path) for path in autosaves(tmp_path))


def test_full_disk_is_named_at_the_next_boundary(tmp_path: Path) -> None:
    """The boundary after the failure reports a full disk, however late the next save is due; training continues."""
    options = {"every_n_train_steps": 3}
    ended = run(lambda: fit_eight([protected(**BEHIND, **options), FullDisk(at=1)], tmp_path))
    assert ended.exit_code == 0, ended.output
    [line] = re.findall("The state (.*) could not be saved", ended.output)
    assert line == "before batch 3 of epoch 0"
    assert "OSError: [Errno 28] No space left on device. The last autosave, before batch 0 of epoch 0" in ended.output


def test_stop_makes_up_for_a_write_that_failed(tmp_path: Path) -> None:
    """A stop reports the failed background write, and saves its own state."""

    class Stop(FullDisk):
        def strike(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)
            super().strike()

    callback = protected(async_save=True, every_n_train_steps=None, overhead_budget=1.0)
    ended = run(lambda: fit_eight([callback, Stop(at=3)], tmp_path, max_epochs=10_000))
    assert ended.exit_code == 143, ended.output
    assert "could not be written in the background" in ended.output
    # The stop may have come anywhere, even in validation: until the first write finishes, training continues.
    ended = run(lambda: fit_eight([protected(async_save=True), KillAt(0)], tmp_path, max_epochs=10_000), seed=99)
    assert ended.exit_code == -signal.SIGKILL, ended.output
    resumed = re.search(r"Resumed exactly .*, global step (\d+)", ended.output)
    assert resumed is not None, ended.output
    assert int(resumed[1]) > 0  # the autosave before the failed write is from the first boundary


class Times(Callback):
    """Records at each batch the newest autosave, their number, and whether one is being written."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        numbers = [int(path.name.split("-")[1]) for path in autosaves(self.directory)]
        is_writing = any(thread.name == "autosave" for thread in threading.enumerate())
        tell(self.directory, "saved", [max(numbers, default=0), len(numbers), is_writing])


def test_each_save_that_was_asked_for_is_written(tmp_path: Path) -> None:
    """With every_n_train_steps the next save waits for the one in flight, and at most keep_last autosaves exist."""
    callbacks = [protected(async_save=True), Times(tmp_path), Held(1)]
    ended = run(lambda: fit_eight(callbacks, tmp_path, max_epochs=1))
    assert ended.exit_code == 0, ended.output
    saved = told(tmp_path, "saved")
    assert [number for number, *_ in saved] == [1, 1, 2, 3, 4, 5, 6, 7]
    assert max(num for _, num, _ in saved) == 2
    assert all(is_writing for *_, is_writing in saved[1:])


def test_save_is_skipped_while_one_is_in_flight(tmp_path: Path) -> None:
    """If the budget decides, training continues while a slow disk writes."""
    callbacks = [protected(async_save=True, every_n_train_steps=None, overhead_budget=1.0), Times(tmp_path), Held(8)]
    ended = run(lambda: fit_eight(callbacks, tmp_path, max_epochs=1))
    assert ended.exit_code == 0, ended.output
    assert [number for number, *_ in told(tmp_path, "saved")] == [1] * 8


def test_first_and_last_are_waited_for(tmp_path: Path) -> None:
    """The first autosave exists at the first batch and the finished one when fit returns; then no thread is left."""

    def main() -> None:
        fit_eight([protected(async_save=True), Disk(0.05), Times(tmp_path)], tmp_path, max_epochs=1)
        assert not [thread for thread in threading.enumerate() if thread.name == "autosave"]
        newest = load_file(autosaves(tmp_path)[-1])
        tell(tmp_path, "last", newest["lightning_faulttolerant"]["position"]["where"])

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "saved")[0][0] == 1
    assert told(tmp_path, "last") == ["finished"]


def test_what_training_changes_meanwhile_is_not_in_the_file(tmp_path: Path) -> None:
    """A file that is written long after its boundary equals one that is written at it."""

    class Slow(Net):
        def __init__(self) -> None:
            super().__init__()
            self.notes = [0]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.notes.append(batch_idx)
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["notes"] = self.notes

    def main(name: str, **options: Any) -> None:
        callbacks = [protected(dirpath=tmp_path / name, keep_last=9, **options), Disk(0.03)]
        fit_eight([*callbacks, KillAt(7)], tmp_path / name, module=Slow(), max_epochs=1)

    run(lambda: main("in background", async_save=True))
    run(lambda: main("at once"))
    found, expected = (
        {path.name: load_file(path) for path in autosaves(tmp_path / name)} for name in ("in background", "at once")
    )
    assert len(found) >= 6
    for name, checkpoint in found.items():
        for part in ("state_dict", "optimizer_states", "notes", "global_step", "lr_schedulers"):
            assert str(checkpoint[part]) == str(expected[name][part])
        for key, weight in checkpoint["state_dict"].items():
            assert torch.equal(weight, expected[name]["state_dict"][key])


class Uncopied(torch.Tensor):
    """A tensor that torch.save writes, but that can't be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies of this one")


class HoldsUncopied(Net):
    """Saves a tensor that can't be copied and changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2).as_subclass(Uncopied)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.total += loss.detach()
        return loss + 0.01 * self.total.as_subclass(torch.Tensor).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["total"] = self.total

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.total = checkpoint["total"]


def test_what_cannot_be_copied_is_written_at_once() -> None:
    """If a copy fails, the fit waits for the save: the run continues, and is exact."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        with torch.serialization.safe_globals([Uncopied]):
            return fit_eight(callbacks, directory, module=HoldsUncopied())

    [cost] = assert_resumes_exactly(fit, [KillAt(3)], options=ALWAYS)
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, 0, 3)
