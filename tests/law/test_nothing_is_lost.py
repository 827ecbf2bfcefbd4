"""Files of others stay: those of another run, the file that a run started from, and the rows of a refused run."""

from __future__ import annotations

import csv
import signal
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import Ended, run
from tests.runs import Net, fit_net

pytestmark = pytest.mark.filterwarnings(
    "ignore:The dirpath has changed from:UserWarning",
    "ignore:Experiment logs directory .* exists and is not empty:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)


class Falling(Net):
    """Logs a score that is best in its last epoch, and worse in its second than in its first."""

    def on_train_epoch_end(self) -> None:
        epoch = self.trainer.current_epoch
        self.log("score", 5.0 if epoch == 1 else -float(epoch))


def fit(
    directory: Path, run_id: str, *faults: Callback, saving: ModelCheckpoint | None = None, **arguments: Any
) -> Any:
    """Fit with an autosave at every step and a file for every epoch."""
    saving = saving or ModelCheckpoint(save_top_k=-1, every_n_epochs=1, filename="{epoch}")
    protected = FaultTolerance(directory / "autosaves", run_id=run_id, every_n_train_steps=1)
    return fit_net([*faults, protected, saving], directory, enable_checkpointing=True, **arguments)


def ended_well(ended: Ended) -> None:
    """Check that a process ended without an error."""
    assert ended.exit_code == 0, ended.output


def contents(directory: Path) -> dict[Path, bytes]:
    """Return the content of each file below a directory."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_run_that_a_killed_one_starts_from_keeps_its_files(tmp_path: Path) -> None:
    """A killed run that is restarted from another run's file leaves that run's rows and checkpoints alone."""
    first = tmp_path / "lightning_logs" / "version_0"

    def main(run_id: str, *faults: Callback, ckpt_path: Any = None) -> None:
        fit(tmp_path, run_id, *faults, logger=CSVLogger(tmp_path), max_epochs=3, ckpt_path=ckpt_path)

    ended_well(run(lambda: main("a")))
    before = contents(first)
    assert run(lambda: main("b", KillAt(3)), seed=2).exit_code == -signal.SIGKILL
    ended_well(run(lambda: main("b", ckpt_path=first / "checkpoints" / "epoch=0.ckpt"), seed=3))
    assert contents(first) == before
    assert (tmp_path / "lightning_logs" / "version_2" / "metrics.csv").exists()


def test_files_of_a_run_in_the_same_directory_are_not_written_over(tmp_path: Path) -> None:
    """Files that another run writes to the directory between kill and resume stay: new names get a version."""

    def main(run_id: str, *faults: Callback) -> None:
        saving = ModelCheckpoint(tmp_path / "files", save_top_k=-1, every_n_epochs=1, filename="{epoch}")
        fit(tmp_path, run_id, *faults, saving=saving, max_epochs=3)

    assert run(lambda: main("a", KillAt(7))).exit_code == -signal.SIGKILL
    ended_well(run(lambda: main("b"), seed=2))
    before = contents(tmp_path / "files")
    ended_well(run(lambda: main("a"), seed=3))
    after = contents(tmp_path / "files")
    assert {path: after.get(path) for path in before} == before
    names = sorted(path.name for path in after)
    assert names == [f"epoch={n}{version}.ckpt" for n in range(3) for version in ("-v1", "")]


def test_refused_resume_leaves_the_metrics(tmp_path: Path) -> None:
    """Rows after the autosave stay if the resume is refused, and are removed if not."""

    def main(*faults: Callback, batch_size: int) -> None:
        logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
        train = DataLoader(NoisyDataset(20), batch_size=batch_size, shuffle=True)
        protected = FaultTolerance(tmp_path / "autosaves", run_id="a", every_n_train_steps=3)
        fit_net([*faults, protected], tmp_path, logger=logger, train=train)

    file = tmp_path / "lightning_logs" / "version_0" / "metrics.csv"
    assert run(lambda: main(KillAt(4), batch_size=4)).exit_code == -signal.SIGKILL
    before = file.read_bytes()
    refused = run(lambda: main(batch_size=2), seed=2)
    assert "FingerprintMismatchError" in refused.output
    assert file.read_bytes() == before
    ended_well(run(lambda: main(batch_size=4), seed=3))
    with open(file, newline="") as rows:
        steps = [int(row["step"]) for row in csv.DictReader(rows) if row["loss_step"]]
    assert steps == list(range(10))


def test_file_that_a_run_was_started_from_stays(tmp_path: Path) -> None:
    """ModelCheckpoint keeps the file that the script names at each start, even across an interruption."""
    start = tmp_path / "files" / "epoch=0.ckpt"

    def main(*faults: Callback, is_first: bool = False) -> None:
        saving = ModelCheckpoint(tmp_path / "files", monitor="score", mode="min", save_top_k=1, filename="{epoch}")
        arguments: dict[str, Any] = {"max_epochs": 1} if is_first else {"max_epochs": 3, "ckpt_path": start}
        fit(tmp_path, "a" if is_first else "b", *faults, saving=saving, module=Falling(), **arguments)

    ended_well(run(lambda: main(is_first=True)))
    assert run(lambda: main(KillAt(3)), seed=2).exit_code == -signal.SIGKILL
    ended_well(run(lambda: main(), seed=3))
    assert sorted(path.name for path in start.parent.iterdir()) == ["epoch=0.ckpt", "epoch=2.ckpt"]
