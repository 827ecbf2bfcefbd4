"""What a fit tells its supervisor: the section that it is in, its autosaves, and the batch that has failed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance, HangWatch
from lightning_faulttolerant.processes import parents_and_states
from lightning_faulttolerant.supervision.heartbeats import (
    DIRECTORY_VARIABLE,
    SECTION_NAMES,
    ProcessHeartbeat,
    read_failures,
    read_heartbeats,
)
from lightning_faulttolerant.supervision.watch import SIGNAL
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Net
from tests.processes import wait_for
from tests.runs import fit_net, make_trainer


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a supervisor, which ``run`` would have set."""
    directory = tmp_path / "supervisor"
    directory.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))
    return directory


def heartbeat_in(directory: Path) -> ProcessHeartbeat:
    """Return the heartbeat of this process."""
    [heartbeat] = [each for each in read_heartbeats(directory) if each.process_id == os.getpid()]
    return heartbeat


HOOKS = {
    "on_fit_start": "fit",
    "on_train_batch_start": "batch",
    "on_validation_batch_start": "validation batch",
    "on_validation_epoch_end": "validation end",
    "on_save_checkpoint": "save",
    "on_train_epoch_end": "epoch end",
    "on_train_end": "end",
}


def listener(directory: Path) -> Any:
    """Return a callback that notes in which section and at which batch its hooks are called."""
    heard: list[tuple[Any, ...]] = []

    def hear(name: str) -> None:
        found = heartbeat_in(directory)
        heard.append((name, SECTION_NAMES[found.section], found.epoch, found.batch, found.evaluated))

    hooks = {hook: lambda self, *_, name=name: hear(name) for hook, name in HOOKS.items()}
    return type("Listens", (Callback,), {**hooks, "heard": heard})()


def test_each_section_is_marked(tmp_path: Path, supervisor: Path) -> None:
    """Hooks find themselves in their sections, and after the fit nothing is watched."""
    listens = listener(supervisor)
    protection = FaultTolerance(tmp_path / "autosaves", every_n_train_steps=2)
    fit_net([protection, listens], tmp_path, max_epochs=1, limit_train_batches=3, num_sanity_val_steps=0)
    of_epoch = [
        ("fit", "setup", 0, 0, -1),
        ("save", "save", 0, 0, -1),
        ("batch", "first batch", 0, 0, -1),
        ("batch", "training batch", 0, 1, -1),
        ("save", "save", 0, 1, -1),
        ("batch", "training batch", 0, 2, -1),
        ("validation batch", "evaluation batch", 0, 3, 0),
        ("validation batch", "evaluation batch", 0, 3, 1),
        ("validation end", "end of epoch", 0, 3, 1),
        ("epoch end", "end of epoch", 0, 3, 1),
        ("end", "end of epoch", 0, 3, 1),
        ("save", "save", 0, 3, 1),
    ]
    assert listens.heard == of_epoch
    heartbeat = heartbeat_in(supervisor)
    assert SECTION_NAMES[heartbeat.section] == "outside of a fit"
    assert heartbeat.saved == (1, 2**62, 0, 0)
    assert Path(heartbeat.directory).parent == tmp_path / "autosaves"


class Fails(Net):
    def __init__(self, stage: str = "", at: int = -1) -> None:
        super().__init__()
        self.fails_in = stage, at

    def training_step(self, batch: Tensor, batch_idx: int, stage: str = "training") -> Any:
        if self.fails_in == (stage, batch_idx):
            raise ValueError("boom")
        return self.layers(batch) if stage == "predict" else super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.training_step(batch, batch_idx, "validation")

    def predict_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.training_step(batch, batch_idx, "predict")


class BadSample(NoisyDataset):
    def __getitem__(self, index: int) -> Tensor:
        if index == 13:
            raise ValueError("boom")
        return super().__getitem__(index)


class RaisesAtStart(Callback):
    def on_train_start(self, *_: Any) -> None:
        raise ValueError("boom")


def loader(data: Any = None, **arguments: Any) -> DataLoader[Tensor]:
    """Return a loader of samples in their order."""
    return DataLoader(NoisyDataset(20) if data is None else data, batch_size=4, shuffle=False, **arguments)


# The function, the module, the loader, and further callbacks; then the place, and the samples of its batch.
THIRD = [12, 13, 14, 15]
IN_VALIDATION = "in batch 1 of the validation run after batch 5 of epoch 0"
FAILURES: dict[str, tuple[tuple[str, Net, Any, list[Callback]], str, dict[str, list[int]]]] = {
    "step": (("fit", Fails("training", 3), loader(), []), "in batch 3 of epoch 0", {"train/0": THIRD}),
    "validation step": (("fit", Fails("validation", 1), loader(), []), IN_VALIDATION, {"validation/0": [4, 5, 6, 7]}),
    "sample of a worker": (
        ("fit", Net(), loader(BadSample(20), num_workers=2), []), "in batch 3 of epoch 0", {"train/0": THIRD}
    ),
    "step of predict": (("predict", Fails("predict", 3), loader(), []), "in batch 3 of predict", {"predict/0": THIRD}),
    "sample of predict": (
        ("predict", Fails(), loader(BadSample(20)), []), "in batch 3 of predict", {"predict/0": THIRD}
    ),
    "start": (("fit", Net(), loader(), [RaisesAtStart()]), "before the first batch of fit", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILURES)
def test_batch_of_a_failure_is_reported(case: str, tmp_path: Path, supervisor: Path) -> None:
    """The failure has the batch and the indices of its samples, also if workers have fetched ahead.

    It is forgotten if the script has caught it: it would be the reason for whatever ends the process later.
    """
    (function, module, data, callbacks), place, samples = FAILURES[case]
    protection = FaultTolerance(tmp_path / "autosaves", every_n_train_steps=1)
    trainer = make_trainer([protection, *callbacks], tmp_path, num_sanity_val_steps=0)
    with pytest.raises(ValueError, match="boom"):
        getattr(trainer, function)(module, data, *([loader(NoisyDataset(8))] if function == "fit" else []))
    [found] = read_failures(supervisor)
    assert (found.kind, found.place, found.samples) == ("ValueError", place, samples)
    assert "boom" in found.text
    fit_net([FaultTolerance(tmp_path / "others")], tmp_path, max_epochs=1)
    assert read_failures(supervisor) == []


def test_fit_without_room_for_its_marks_runs_unwatched(
    tmp_path: Path, supervisor: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full memory is told, and nothing is left that a watcher could take for a hang."""

    def full(*_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    fit_net([FaultTolerance(tmp_path / "autosaves"), HangWatch("report")], tmp_path, max_epochs=1)
    assert "its heartbeat can't be written: No space left on device" in caplog.text
    assert list(read_heartbeats(supervisor)) == []


def watchers() -> set[int]:
    """Return the processes that this one has started and that are alive."""
    parents, states = parents_and_states()
    return {child for child, parent in parents.items() if parent == os.getpid() and states[child] != "Z"}


def catches_the_signal() -> bool:
    """Return whether this process has a handler for the signal that asks for stacks."""
    assert SIGNAL is not None
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("SigCgt")]
    return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)


@pytest.mark.parametrize("watch", [[HangWatch("report")], []], ids=["watched", "not watched"])
def test_nothing_is_left_after_the_fit(tmp_path: Path, watch: list[Callback]) -> None:
    """A watcher and a handler are there during the fit if they are asked for, and gone after it."""
    before = watchers()
    found: list[tuple[int, bool]] = []

    class Looks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            found.append((len(watchers() - before), catches_the_signal()))

    fit_net([FaultTolerance(tmp_path / "autosaves"), *watch, Looks()], tmp_path, max_epochs=1)
    assert found[-1] == (len(watch), bool(watch))
    assert not catches_the_signal()
    wait_for(lambda: not watchers() - before)  # they end by themselves
