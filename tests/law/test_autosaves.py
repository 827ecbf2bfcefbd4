"""Autosaves of a fit: when they are written, what they contain, and what a resume does with good and bad ones."""

from __future__ import annotations

import argparse
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import Script, run
from tests.runs import Net, eight_batches, fit_net
from tests.scripts import autosaves, protected, tell, told, weights


class Crash(Callback):
    """Kills the process in a hook of its start."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    def on_load_checkpoint(self, *_: Any) -> None:
        self._crash("on_load_checkpoint")

    def on_train_start(self, *_: Any) -> None:
        self._crash("on_train_start")

    def _crash(self, hook: str) -> None:
        if hook == self.hook:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("hook", ["on_load_checkpoint", "on_train_start"])
def test_crash_during_the_resume_itself(hook: str) -> None:
    """A restart that dies while it restores costs nothing: the next one resumes from the same autosave."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory)

    # The second process leaves no events: it dies before any batch.
    with_crash = [KillAt(3), Crash(hook)]
    with pytest.raises(AssertionError, match="ended before it could continue"):
        assert_resumes_exactly(fit, with_crash, options={"every_n_train_steps": 1})


@pytest.mark.parametrize("hook", ["on_load_checkpoint", "on_train_start"])
def test_resume_after_a_crash_during_the_resume(hook: str, tmp_path: Path) -> None:
    """After a crash during the resume, the third process trains what the uninterrupted run trains."""

    def main(name: str, *faults: Callback) -> None:
        tell(tmp_path, name, weights(fit_net([protected(), *faults], tmp_path / name)))

    assert run(lambda: main("whole")).exit_code == 0
    assert run(lambda: main("killed", KillAt(3))).exit_code == -signal.SIGKILL
    assert run(lambda: main("killed", Crash(hook)), seed=98).exit_code == -signal.SIGKILL
    ended = run(lambda: main("killed"), seed=99)
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert told(tmp_path, "killed") == told(tmp_path, "whole")


@pytest.mark.filterwarnings("ignore:.*no last checkpoint available")
def test_last_is_taken_where_no_autosave_verifies(tmp_path: Path) -> None:
    """With ckpt_path="last", a run without valid autosaves resumes from the file of its ModelCheckpoint."""

    def main(*faults: Callback) -> None:
        last = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True, every_n_train_steps=2)
        fit_net([protected(), last, *faults], tmp_path, enable_checkpointing=True, ckpt_path="last")

    run(lambda: main(KillAt(3)))
    for path in autosaves(tmp_path):
        path.write_bytes(b"nothing")
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    assert "none of them verifies" in ended.output
    assert "Resumed exactly after the step of batch 1 of epoch 0" in ended.output


def test_remedy_where_no_autosave_verifies_works(tmp_path: Path) -> None:
    """auto_resume=False sets the damaged autosaves aside and starts from the user's file, as the error says."""
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))
    newest = autosaves(tmp_path)[-1]
    own = tmp_path / "own.ckpt"
    own.write_bytes(newest.read_bytes())
    for path in autosaves(tmp_path):
        path.write_bytes(b"nothing")
    ended = run(lambda: fit_net([protected()], tmp_path, ckpt_path=own))
    assert (ended.exit_code, "FaultTolerance(auto_resume=False)" in ended.output) == (1, True), ended.output
    ended = run(lambda: fit_net([protected(auto_resume=False)], tmp_path, ckpt_path=own), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch" in ended.output


class Times(Callback):
    """Records at each batch how many autosaves exist."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        numbers = [int(path.name.split("-")[1]) for path in autosaves(self.directory)]
        tell(self.directory, "saved", [max(numbers, default=0), len(numbers)])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"every_n_train_steps": 2}, [1, 1, 2, 2, 3]),
        ({"train_time_interval": timedelta(hours=1)}, [1] * 5),
        ({"overhead_budget": 1.0}, list(range(1, 6))),
        ({"overhead_budget": 0.000001}, [1] * 5),
    ],
)
def test_when_autosaves_are_written(options: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    """The first boundary always saves; after that the steps, the time, or the budget decide."""
    callback = FaultTolerance(**options)
    ended = run(lambda: fit_net([callback, Times(tmp_path)], tmp_path, max_epochs=1))
    assert ended.exit_code == 0, ended.output
    assert [number for number, _ in told(tmp_path, "saved")] == expected


def test_keep_last_is_kept(tmp_path: Path) -> None:
    """At most keep_last autosaves exist at any batch."""
    run(lambda: fit_net([protected(keep_last=3), Times(tmp_path)], tmp_path, max_epochs=1))
    assert [count for _, count in told(tmp_path, "saved")] == [1, 2, 3, 3, 3]


def test_auto_resume_off_sets_the_autosaves_aside(tmp_path: Path) -> None:
    """Without auto_resume the run starts from the beginning, and nothing is deleted."""
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))
    ended = run(lambda: fit_net([protected(auto_resume=False), KillAt(2)], tmp_path))
    assert "Resumed" not in ended.output
    assert list(tmp_path.rglob("superseded-*/autosave-*.ckpt"))


class Configured(Net):
    """Has hyperparameters of every kind."""

    def __init__(self, **hyperparameters: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_of_any_kind_are_no_obstacle(tmp_path: Path) -> None:
    """A resume works with paths, namespaces, classes, and functions as hyperparameters, and does not load them."""

    def main(*faults: Callback) -> None:
        module = Configured(path=Path("/data"), space=argparse.Namespace(a=1), kind=dict, function=os.getcwd, plain=3)
        fit_net([protected(), *faults], tmp_path, module=module)

    assert run(lambda: main(KillAt(3))).exit_code == -signal.SIGKILL
    part = load_file(autosaves(tmp_path)[-1])["lightning_faulttolerant"]
    assert list(part["opaque"]) == ["hyper_parameters"]
    ended = run(main, seed=99)
    assert "Resumed exactly before batch 3" in ended.output, ended.output


def test_state_that_would_not_load_raises_at_the_first_boundary(tmp_path: Path) -> None:
    """A callback's state that a resume could not load is reported before any batch is trained."""

    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("/data")}

    ended = run(lambda: fit_net([protected(trust_autosaves=False), Keeps(), Times(tmp_path)], tmp_path))
    assert ended.exit_code == 1
    assert "UnsafeCheckpointError" in ended.output
    assert "/where" in ended.output
    assert told(tmp_path, "saved") == []


def test_autosave_loads_without_the_package_and_restores_in_plain_lightning(tmp_path: Path) -> None:
    """An autosave is a Lightning checkpoint: a fit without the callback accepts it as its ckpt_path."""
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))
    newest = autosaves(tmp_path)[-1]
    assert torch.load(newest, weights_only=True)["global_step"] == 3
    ended = run(lambda: fit_net([], tmp_path / "plain", ckpt_path=newest, num_sanity_val_steps=0))
    assert "ended before the epoch ended" in ended.output or ended.exit_code == 0


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc").exists(), reason="needs a directory that can't be written")
def test_directory_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    """An unwritable directory is an error before the first batch, with the path in the message."""
    ended = run(lambda: fit_net([protected(dirpath="/proc/nothing"), Times(tmp_path)], tmp_path))
    assert ended.exit_code == 1
    assert "/proc/nothing" in ended.output
    assert told(tmp_path, "saved") == []


def test_report_says_what_was_restored(tmp_path: Path) -> None:
    """The report names file, position, parts, and time, as text and as a dataclass."""

    def main() -> None:
        callback = protected()
        fit_net([callback], tmp_path)
        report = callback.resume_report
        assert report is not None
        tell(tmp_path, "report", [report.epoch, report.batch, report.global_step, report.is_exact, report.path])
        tell(tmp_path, "text", str(report))

    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))
    newest = autosaves(tmp_path)[-1]
    ended = run(main, seed=99)
    assert ended.exit_code == 0, ended.output
    [[epoch, batch, step, is_exact, path]] = told(tmp_path, "report")
    assert (epoch, batch, step, is_exact, path) == (0, 3, 3, True, str(newest))
    [text] = told(tmp_path, "text")
    assert text.splitlines()[0].startswith("Resumed exactly before batch 3 of epoch 0, global step 3, in ")
    for part in ("weights", "random generators", "order of samples and workers", "metrics", "logged values"):
        assert part in text


@pytest.mark.parametrize("num_workers", [0, 2])
def test_process_is_gone_in_time(num_workers: int, tmp_path: Path) -> None:
    """A process that gets SIGTERM from outside reports where it stopped, and ends within 5 seconds."""

    class Started(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            (tmp_path / "started").touch()
            time.sleep(0.01)

    def main() -> None:
        loader = DataLoader(NoisyDataset(), batch_size=4, num_workers=num_workers)
        fit_net([protected(), Started()], tmp_path, train=loader, max_epochs=100)

    script = Script(main)
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    began = time.monotonic()
    os.kill(script.process_id, signal.SIGTERM)
    ended = script.wait()
    assert time.monotonic() - began < 5
    assert ended.exit_code == 143
    assert "Stopped by SIGTERM before batch" in ended.output
    place = r"before batch \d+ of epoch \d+"
    assert re.search(rf"The state {place} is saved in {tmp_path}.* To continue, type: ", ended.output)


class Stream(IterableDataset[Any]):
    """An iterable data set of rows with noise."""

    def __iter__(self) -> Iterator[Any]:
        return (NoisyDataset(8)[index] for index in range(8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_any_validation_data_that_is_run_whole(num_workers: int) -> None:
    """A validation loader that can't be followed is accepted if each of its runs starts over."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        validation = DataLoader(Stream(), batch_size=4, num_workers=num_workers)
        return fit_net(callbacks, directory, train=eight_batches(), validation=validation, val_check_interval=4)

    [cost] = assert_resumes_exactly(fit, [KillAt(5)], options={"every_n_train_steps": 1})
    assert cost.batch == 5


def test_other_surroundings_are_reported(tmp_path: Path) -> None:
    """A different number of threads leaves the state exact, and the report says that the last bits may differ."""
    run(lambda: fit_net([protected(), KillAt(3)], tmp_path))

    def main() -> None:
        torch.set_num_threads(2)
        fit_net([protected()], tmp_path)

    ended = run(main, seed=99)
    assert "Resumed exactly" in ended.output
    assert "threads: 1 when it was saved, 2 now" in ended.output
