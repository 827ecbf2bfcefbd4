"""However often a run is killed, it advances; a resumed fit does not write the state that it has just read."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import Script, run
from tests.runs import Net, fit_eight, fit_net
from tests.scripts import autosaves, protected, tell, told, weights

START_SECONDS = 1.0
NUM_BATCHES = 400


class Slow(Net):
    """Takes 20 ms a batch and 0.1 s for a save; the very first save takes a second."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        time.sleep(0.1 if self.trainer.global_step else 1.0)


class Begins(Callback):
    """Records when a process has started, and from which step it continues."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        tell(self.directory, "begun", [time.time(), trainer.global_step])


def killed_again_and_again(directory: Path) -> int:
    """Kill the script whenever it has run three times as long as its last start took; return the number of kills."""

    def main() -> None:
        time.sleep(START_SECONDS)  # as long as imports and data would take
        train = DataLoader(NoisyDataset(2 * NUM_BATCHES), batch_size=2)
        net = fit_net(
            [FaultTolerance(), Begins(directory)],
            directory,
            train=train,
            module=Slow(),
            max_epochs=1,
            limit_val_batches=0,
        )
        tell(directory, "weights", weights(net))

    for number in range(12):
        script, began = Script(main), time.time()
        while not told(directory, "weights"):
            time.sleep(0.02)
            begun = told(directory, "begun")[number:]
            if begun and time.time() - began > 3 * (begun[0][0] - began):
                break
        else:
            script.wait()
            return number
        os.killpg(script.process_id, signal.SIGKILL)
        script.wait()
    raise AssertionError(f"the run did not end: {told(directory, 'begun')}")


@pytest.mark.slow
def test_run_that_is_killed_at_three_times_its_start_ends(tmp_path: Path) -> None:
    """By default, with a first save of one second, each process advances, and the run finishes."""
    assert killed_again_and_again(tmp_path) >= 2
    steps = [step for _, step in told(tmp_path, "begun")]
    assert steps == sorted(steps)
    assert len(set(steps[1:])) == len(steps[1:])


def test_resumed_fit_does_not_write_what_it_has_read(tmp_path: Path) -> None:
    """The autosave that it resumed from stays the newest until there is a new state, and can be resumed from again."""

    class Looks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            tell(tmp_path, "names", [path.name for path in autosaves(tmp_path)])

    run(lambda: fit_eight([protected(), KillAt(3)], tmp_path))
    before = [path.name for path in autosaves(tmp_path)]
    killed = run(lambda: fit_eight([protected(), Looks(), KillAt(0)], tmp_path), seed=5)
    assert killed.exit_code == -signal.SIGKILL
    assert told(tmp_path, "names") == [before]
    stopped = run(lambda: fit_eight([protected(), KillAt(0, signum=signal.SIGTERM)], tmp_path), seed=6)
    assert "Resumed exactly before batch 3 of epoch 0" in stopped.output
    assert "The state before batch 4 of epoch 0 is saved in" in stopped.output


def test_resumed_fit_saves_at_once_where_the_autosave_is_another_state(tmp_path: Path) -> None:
    """After a resume from a user's checkpoint, or one that is not exact, the first boundary is saved as usual."""
    first = tmp_path / "first"
    run(lambda: fit_eight([protected(), KillAt(3)], first))
    own = tmp_path / "own.ckpt"
    own.write_bytes(autosaves(first)[-1].read_bytes())

    class Looks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            tell(tmp_path, "number", len(autosaves(tmp_path / "other")))

    run(lambda: fit_eight([protected(), Looks(), KillAt(0)], tmp_path / "other", ckpt_path=own), seed=5)
    assert told(tmp_path, "number") == [1]
    newest = autosaves(first)[-1].name

    ended = run(
        lambda: fit_eight(
            [protected(strict=False), KillAt(0)], first, train=DataLoader(NoisyDataset(40), 4, shuffle=True)
        ),
        seed=5,
    )
    assert "Resumed exactly" not in ended.output
    assert autosaves(first)[-1].name > newest


def test_killed_at_each_start_of_a_resumed_fit() -> None:
    """Killed twice before any new save, a run resumes from the same autosave, exactly."""
    faults = [KillAt(5), KillAt(2), KillAt(2)]
    costs = assert_resumes_exactly(fit_eight, [[fault] for fault in faults], options={"every_n_train_steps": 4})
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 4)] * 3
