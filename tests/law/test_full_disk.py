"""With a full disk or an unreachable store midway, the run continues and equals the uninterrupted one."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.cli import main as command
from lightning_faulttolerant.records.history import FitHistory
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.records.lines import read_lines
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.full_disks import FullDisk, Unreachable
from tests.processes import Ended, run
from tests.runs import Net, fit_eight
from tests.scripts import protected, tell, told, weights

EVERY_STEP = {"every_n_train_steps": 1}
COULD_NOT = "could not be saved: OSError: [Errno 28] No space left on device"
AGAIN = "Autosaves can be written again"


class Notes(Net):
    """Keeps a list and a counter, which training changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[int] = []
        self.counts = {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.notes.append(batch_idx)
        self.counts["steps"] += len(self.notes)
        return super().training_step(batch, batch_idx) * (1 + 0.01 * (self.counts["steps"] % 7))


def fit_notes(callbacks: list[Callback], directory: Path, **arguments: Any) -> Any:
    """Fit 8 batches an epoch with object state."""
    return fit_eight(callbacks, directory, module=Notes(), **arguments)


def fits_of(directory: Path) -> list[FitHistory]:
    """Return the fits in the history of the run."""
    [path] = directory.rglob("history.jsonl")
    [chapter] = history_of(read_lines(path)).chapters
    return list(chapter.fits)


def report_on(directory: Path) -> str:
    """Return the output of the report command."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert command(["report", str(directory)]) == 0
    return output.getvalue()


def fit_with(directory: Path, *callbacks: Callback, name: str = "weights", **options: Any) -> Ended:
    """Fit as a script, and report the weights."""

    def main() -> None:
        place = directory / ("run" if name == "weights" else name)
        tell(directory, name, weights(fit_notes([protected(**options), *callbacks], place)))

    return run(main)


def test_run_is_the_same_and_says_so_once(tmp_path: Path) -> None:
    """The weights equal those of a run with room; the start and the end of the outage are reported once each."""
    assert fit_with(tmp_path, name="whole").exit_code == 0

    class Looks(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
            names = sorted(path.name for path in files if "autosave" in path.name)
            tell(tmp_path, "names", names)
            assert all(load_file(path) for path in files if path.suffix == ".ckpt")

    ended = fit_with(tmp_path, FullDisk(3, 6), Looks())
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "weights") == told(tmp_path, "whole")
    assert ended.output.count("could not be saved") == ended.output.count(AGAIN) == 1
    assert f"The state before batch 4 of epoch 0 {COULD_NOT}" in ended.output
    assert "The last autosave, before batch 3 of epoch 0, stays. The run continues" in ended.output
    assert "3 saves had failed in" in ended.output
    names = told(tmp_path, "names")[:9]
    assert names[3] == names[4] == names[5] == names[6] != names[7]  # and no partial file is left
    assert all(len(found) == 2 for found in names[1:])
    [fit] = fits_of(tmp_path / "run")
    [unsaved] = fit.unsaved
    assert unsaved.until is not None
    assert fit.began < unsaved.since < unsaved.until < fit.last_seen
    assert unsaved.tries == 3
    assert "No space left on device" in unsaved.text
    report = " ".join(report_on(tmp_path / "run").split())
    assert re.search(
        r"Process 1 could save nothing for \d\S+ m?s, 3 tries: OSError: \[Errno 28\] No space left", report
    )


def test_finished_fit_that_can_not_be_saved_is_finished(tmp_path: Path) -> None:
    """If the final save fails, the fit still finishes without an error and the script continues."""
    ended = fit_with(tmp_path, FullDisk(14))
    assert ended.exit_code == 0, ended.output
    assert len(told(tmp_path, "weights")) == 1
    assert f"The state before batch 7 of epoch 1 {COULD_NOT}" in ended.output


def test_stop_in_validation_that_can_not_be_saved(tmp_path: Path) -> None:
    """The same holds for a stop inside a validation run."""

    def main() -> None:
        faults = [FullDisk(3), KillAt(3, signum=signal.SIGTERM, hook="validation")]
        fit_eight([protected(), *faults], tmp_path, val_check_interval=4)

    ended = run(main)
    assert ended.exit_code == 74, ended.output
    assert "The last autosave, before batch 3 of epoch 0, is 1 batch older." in ended.output


def test_exception_is_seen_where_nothing_can_be_saved(tmp_path: Path) -> None:
    """The user's error is raised, and the message names the last autosave."""

    class Raises(Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 6:
                raise ZeroDivisionError("of the user's")

    ended = fit_with(tmp_path, FullDisk(4), Raises(), overhead_budget=1.0)
    assert ended.exit_code == 1
    assert "ZeroDivisionError: of the user's" in ended.output
    assert "ZeroDivisionError: The state could not be saved: OSError: [Errno 28]" in ended.output
    assert "The last autosave, before batch 4 of epoch 0, is " in ended.output


def test_full_disk_at_the_start_is_an_error(tmp_path: Path) -> None:
    """A run that could never resume does not start."""
    ended = fit_with(tmp_path, FullDisk(-1))
    assert ended.exit_code == 1
    assert "OSError: [Errno 28] No space left on device" in ended.output
    assert not told(tmp_path, "weights")


def test_state_that_would_not_load_is_an_error_in_mid_run(tmp_path: Path) -> None:
    """A problem with the state, not with the disk, is an immediate error."""

    class Keeps(Callback):
        num_steps = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.num_steps += 1

        def state_dict(self) -> dict[str, Any]:
            return {"where": Path("/data")} if self.num_steps == 3 else {"where": ""}

    ended = fit_with(tmp_path, Keeps(), trust_autosaves=False)
    assert ended.exit_code == 1
    assert "UnsafeCheckpointError" in ended.output


def test_error_of_a_users_save_is_the_users(tmp_path: Path) -> None:
    """A failed write of a user's hook or of ModelCheckpoint raises as it does without the package."""

    class Writes(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if self.trainer.global_step == 3:
                raise OSError(28, "No space left for this side file")

    ended = run(lambda: fit_eight([protected()], tmp_path / "hook", module=Writes()))
    assert ended.exit_code == 1
    assert "No space left for this side file" in ended.output

    def main() -> None:
        (tmp_path / "file").touch()
        checkpoint = ModelCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=3)

        class Breaks(Callback):
            def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
                if batch_idx == 2:
                    (tmp_path / "checkpoints").rmdir()
                    (tmp_path / "checkpoints").symlink_to(tmp_path / "file")

        fit_eight([protected(), checkpoint, Breaks()], tmp_path / "own", enable_checkpointing=True)

    ended = run(main)
    assert ended.exit_code == 1
    assert "could not be saved" not in ended.output


def test_interval_that_says_when_is_kept(tmp_path: Path) -> None:
    """With train_time_interval the next try comes when the next save is due, not at each boundary."""
    options = {"every_n_train_steps": None, "train_time_interval": timedelta(seconds=0.2)}

    class Slow(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            time.sleep(0.05)

    def main() -> None:
        began = time.monotonic()
        fit_notes([protected(**options), FullDisk(1), Slow()], tmp_path)
        tell(tmp_path, "seconds", time.monotonic() - began)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    [fit] = fits_of(tmp_path)
    assert 2 <= fit.unsaved[0].tries <= told(tmp_path, "seconds")[0] / 0.2 + 1


def test_store_that_is_not_reached(tmp_path: Path) -> None:
    """A store that does not answer for a while is reported once, and the run then equals the uninterrupted one."""
    store = "faulty://runs"

    def main() -> None:
        trainer = fit_notes([protected(dirpath=store), Unreachable(3, 6)], tmp_path)
        tell(tmp_path, "weights", weights(trainer))

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    assert ended.output.count("could not be saved") == ended.output.count(AGAIN) == 1
    assert "the store does not answer" in ended.output
    assert fit_with(tmp_path, name="whole").exit_code == 0
    assert told(tmp_path, "weights") == told(tmp_path, "whole")


@contextlib.contextmanager
def small_disk(directory: Path, num_bytes: int) -> Iterator[None]:
    """Mount a file system of `num_bytes` in memory."""
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(directory)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


def can_mount() -> bool:
    """Return whether this process may mount."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux" or not can_mount(), reason="needs the right to mount a disk")
def test_real_disk_without_room(tmp_path: Path) -> None:
    """The run continues on a disk that is full for a while, and resumes exactly after a kill."""

    class Fills(Callback):
        def __init__(self, first: int, last: int) -> None:
            self.first, self.last, self.num_begun = first, last, -1

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            self.num_begun += 1
            junk = Path(trainer.default_root_dir) / "junk"
            if self.num_begun == self.first:
                with contextlib.suppress(OSError), open(junk, "wb", buffering=0) as file:
                    while file.write(bytes(4096)):
                        pass
            if self.num_begun == self.last:
                junk.unlink()

    disk = tmp_path / "disk"
    with small_disk(disk, 4_000_000):
        killed = run(lambda: fit_notes([protected(), Fills(3, 6), KillAt(11)], disk))
        assert killed.exit_code == -signal.SIGKILL, killed.output
        assert killed.output.count("could not be saved") == killed.output.count(AGAIN) == 1
        assert "No space left on device" in killed.output
        ended = run(lambda: tell(tmp_path, "resumed", weights(fit_notes([protected()], disk))), seed=99)
        assert "Resumed exactly before batch 3 of epoch 1" in ended.output, ended.output
        assert [fit.unsaved[0].tries for fit in fits_of(disk)[:1]] == [3]
    assert fit_with(tmp_path, name="whole").exit_code == 0
    assert told(tmp_path, "resumed") == told(tmp_path, "whole")
