"""A run continues in whatever directory the Trainer has at the next start, and another run never does."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, seed_everything
from torch.utils.data import DataLoader

from lightning_faulttolerant.cli import main as command_line
from lightning_faulttolerant.records.runs import (
    FOLDER,
    VARIABLE,
    Command,
    FitRecord,
    RegisteredRun,
    Registry,
    RunRecord,
)
from lightning_faulttolerant.trainer.identity.starts import write_record
from lightning_faulttolerant.trainer.recorder import KillAt
from lightning_faulttolerant.trainer.run.directory import open_run
from tests.data_sets import NoisyDataset
from tests.processes import Ended, Script, run
from tests.runs import Net, fit_net, make_trainer
from tests.scripts import CountBatches, autosaves, protected, tell, told, weights

CHECKOUT = "/checkout-1/script.py"


@pytest.fixture(autouse=True)
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """Return the registry of the runs of a test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / FOLDER))
    return Registry(tmp_path / FOLDER)


def train(
    directory: Path,
    root: str,
    *faults: Callback,
    seed: int | None = 7,
    rows: int = 20,
    module: type[LightningModule] | None = None,
    **options: Any,
) -> None:
    """Train with a fixed seed in its own directory, and report the number of batches and the final weights."""
    if seed is not None:
        seed_everything(seed)
    count = CountBatches()
    train_loader = DataLoader(NoisyDataset(rows), batch_size=4, shuffle=True)
    trainer = fit_net(
        [protected(**options), count, *faults], directory / root, module=module and module(), train=train_loader
    )
    tell(directory, "told", [count.num_batches, weights(trainer)])


def start(directory: Path, root: str, *faults: Callback, how: dict[str, Any] | None = None, **arguments: Any) -> Ended:
    """Run `train` as a script."""
    return run(lambda: train(directory, root, *faults, **arguments), **(how or {}))


def whole(directory: Path) -> Any:
    """Return the number of batches and the weights of an uninterrupted run."""
    (directory / "whole").mkdir()
    assert start(directory / "whole", "runs/0").exit_code == 0
    return told(directory / "whole", "told")[0]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_new_directory_at_each_start(signum: signal.Signals, tmp_path: Path, registry: Registry) -> None:
    """The run continues, saves in its first directory, and leaves nothing there or in the registry at its end."""
    expected = whole(tmp_path)
    start(tmp_path, "runs/1", KillAt(3, signum=signum))
    [entry] = registry.entries()
    assert Path(entry.directory).is_relative_to(tmp_path / "runs/1")
    start(tmp_path, "runs/2", KillAt(4, signum=signum))
    ended = start(tmp_path, "runs/3")
    assert ended.exit_code == 0, ended.output
    [[num_batches, final]] = told(tmp_path, "told")
    assert num_batches < expected[0] - 6
    assert final == expected[1]
    assert autosaves(tmp_path) == registry.entries() == []
    assert not (tmp_path / FOLDER).exists()
    assert re.search(rf"Resumed exactly [^\n]*, from {tmp_path}/runs/1/[^\n]*/{entry.run_id}/fit-1/", ended.output)


def test_a_new_run_after_a_normal_end(tmp_path: Path) -> None:
    """A finished run is not continued in another directory either."""
    assert start(tmp_path, "runs/1").exit_code == 0
    assert start(tmp_path, "runs/2").exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10, 10]


def test_other_arguments_never_continue(tmp_path: Path) -> None:
    """The interrupted run is named, with the difference and the line that continues it."""
    start(tmp_path, "runs/1", KillAt(3), how={"arguments": ("--lr", "0.1")})
    ended = start(tmp_path, "runs/2", how={"arguments": ("--lr", "0.2")})
    assert [count for count, _ in told(tmp_path, "told")] == [10]
    assert "An interrupted run of script.py is at epoch 0, batch 3" in ended.output
    assert "it was started with other arguments (--lr 0.1)" in ended.output
    assert "To continue it, type: " in ended.output


@pytest.mark.parametrize(
    ("how", "continues"),
    [
        ({}, True),
        ({"seed": 8}, False),
        ({"rows": 24}, False),
        ({"how": {"path": "/checkout-2/script.py", "arguments": ("--lr", "2")}}, False),
        ({"how": {"path": "/checkout-2/other.py"}}, False),
    ],
    ids=["same", "other-seed", "other-data", "other-arguments", "other-script"],
)
def test_another_checkout(how: dict[str, Any], continues: bool, tmp_path: Path) -> None:
    """The same script elsewhere is the same run if it starts exactly alike, and saves in the same place."""
    start(tmp_path, "runs", KillAt(3), how={"path": CHECKOUT})
    ended = start(tmp_path, "runs", **{"how": {"path": "/checkout-2/script.py"}, **how})
    assert ended.exit_code == 0, ended.output
    num_whole = 2 * -(-how.get("rows", 20) // 4)
    assert [count for count, _ in told(tmp_path, "told")] == [num_whole - 3 if continues else num_whole]
    assert (("An interrupted run of script.py" in ended.output) is (not continues)) or "other.py" in str(how)


def test_another_checkout_with_other_data_in_a_data_module(tmp_path: Path) -> None:
    """A difference that is only known after `setup` is refused then, and the other run stays untouched."""
    start(tmp_path, "runs", KillAt(3), module=Net, how={"path": CHECKOUT})
    ended = start(tmp_path, "runs", rows=24, module=Net, how={"path": "/checkout-2/script.py"})
    assert ended.exit_code == 1
    assert "train/0.dataset.length: 20 when it was saved, 24 now" in ended.output
    assert start(tmp_path, "runs", module=Net, how={"path": CHECKOUT}).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [7]


def test_another_checkout_with_its_own_registry(
    tmp_path: Path, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record next to the run's autosaves is enough."""
    start(tmp_path, "runs", KillAt(3), how={"path": CHECKOUT})
    monkeypatch.setenv(VARIABLE, str(tmp_path / "another"))
    assert start(tmp_path, "runs", how={"path": "/checkout-2/script.py"}).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [7]


class Edited(Net):
    """Has another learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.5})


class First(Net):
    """Has a learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"lr": 0.1})


def test_edited_script_is_refused(tmp_path: Path) -> None:
    """The error ends with how to continue, and how to start over."""
    start(tmp_path, "runs", KillAt(3), module=First)
    ended = start(tmp_path, "runs", module=Edited)
    assert ended.exit_code == 1
    assert "FingerprintMismatchError" in ended.output
    lines = ended.output.strip().splitlines()
    assert lines[-2].startswith("To continue the interrupted run, undo the change and type: ")
    assert lines[-1].startswith("To start over, type: lightning-faulttolerant discard ")


UNSEEDED = {"seed": None}


@pytest.mark.parametrize(
    ("first", "then", "how", "continues"),
    [
        ("runs/2026-11-24_10-00", "runs/2026-11-24_11-30", UNSEEDED, True),
        ("runs/a", "runs/b", UNSEEDED, False),
        ("runs/a", "runs/b", {}, True),
        ("runs/2026-11-24_10-00", "runs/2026-11-24_11-30", {"seed": 8}, False),
        ("runs/2026-11-24_10-00", "runs/2026-11-24_11-30", {"module": Edited}, False),
    ],
    ids=["named-by-the-time", "named-by-hand", "exactly-alike", "other-seed", "other-hyperparameter"],
)
def test_same_command_in_another_directory(
    first: str, then: str, how: dict[str, Any], continues: bool, tmp_path: Path
) -> None:
    """A command elsewhere is the same run if it starts exactly alike; without a seed, only if the name is a time."""
    start(tmp_path, first, KillAt(3), **{"module": First, **(how if how is UNSEEDED else {})}, how={"seed": 3})
    ended = start(tmp_path, then, **{"module": First, **how}, how={"seed": 4})
    assert ended.exit_code == 0, ended.output
    assert [count for count, _ in told(tmp_path, "told")] == [7 if continues else 10]
    assert ("An interrupted run of script.py" in ended.output) is not continues


@pytest.mark.parametrize(("content", "continues"), [("a = 1", True), ("a = 2", False)])
def test_script_of_the_same_name(content: str, continues: bool, tmp_path: Path) -> None:
    """Another checkout with the same content has the same script; other content is another script."""
    for name, text in (("one", "a = 1"), ("two", content)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "main.py").write_text(text)
    start(tmp_path, "runs", KillAt(3), how={"path": str(tmp_path / "one" / "main.py")})
    assert start(tmp_path, "runs", how={"path": str(tmp_path / "two" / "main.py")}).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [7 if continues else 10]


class Lossy(Net):
    """Has the name of a loss."""

    def __init__(self, loss: str) -> None:
        super().__init__()
        self.save_hyperparameters({"loss": loss})


def test_loop_over_names(tmp_path: Path) -> None:
    """A fit with another name does not continue the finished one, with the same seed and the same data."""

    def main(losses: list[str], *faults: Callback) -> None:
        for loss in losses:
            train(tmp_path, "runs", *(faults if loss == "l1" else ()), module=lambda: Lossy(loss))  # type: ignore[arg-type]  # noqa: B023

    assert run(lambda: main(["mse", "l1"], KillAt(3))).exit_code == -signal.SIGKILL
    assert run(lambda: main(["l1", "huber"])).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10, 7, 10]


class Lazy(NoisyDataset):
    """Has no length before it is set up."""

    def __len__(self) -> int:
        return len(self.rows) if self.is_set_up else len(self.later)  # type: ignore[attr-defined]

    is_set_up = False


class SetsUp(Net):
    """Sets the data up."""

    def __init__(self, data: Lazy) -> None:
        super().__init__()
        self._data = [data]

    def setup(self, stage: str) -> None:
        self._data[0].is_set_up = True


def test_data_that_cannot_be_asked_yet(tmp_path: Path) -> None:
    """A data set without a length before `setup` does not end the run."""

    def main() -> None:
        data = Lazy(20)
        data.is_set_up = True
        loader = DataLoader(data, batch_size=4)
        data.is_set_up = False
        trainer = make_trainer([protected()], tmp_path)
        trainer.fit(SetsUp(data), loader, DataLoader(NoisyDataset(8), batch_size=4))

    ended = run(main)
    assert ended.exit_code == 0, ended.output


def test_working_directory_that_is_gone(tmp_path: Path) -> None:
    """Training does not need a working directory."""
    (tmp_path / "here").mkdir()

    def main() -> None:
        os.chdir(tmp_path / "here")
        (tmp_path / "here").rmdir()
        train(tmp_path, "runs")

    ended = run(main)
    assert ended.exit_code == 0, ended.output


def test_threads(tmp_path: Path, registry: Registry) -> None:
    """Two fits at a time have their own numbers, and each records its own end."""

    def main() -> None:
        run_of = open_run(tmp_path, "run")
        run_of.begin_fit(keep_last=1)
        run_of.begin_fit(keep_last=1)
        record = RunRecord(run_id="run", fits={number: FitRecord(start={"a": number}) for number in (1, 2)})
        write_record(run_of.directory, record)
        run_of.end_fit(1)
        tell(tmp_path, "finished", [fit.is_finished for fit in run_of.record.fits.values()])
        os._exit(0)

    run(main)
    assert told(tmp_path, "finished") == [[True, False]]


def test_registry_that_others_empty(registry: Registry) -> None:
    """Processes that add and remove at the same time lose nothing."""
    command = Command(script="/a.py")
    entries = [RegisteredRun(run_id=name, directory=f"/{name}", command=command, began=0.0) for name in ("a", "b")]

    def add_and_remove(entry: RegisteredRun) -> None:
        for _ in range(300):
            registry.add(entry)
            registry.remove(entry.directory)

    processes = [Script(lambda entry=entry: add_and_remove(entry)) for entry in entries]  # type: ignore[misc]
    for process in processes:
        ended = process.wait()
        assert ended.exit_code == 0, ended.output


def test_list_and_discard(tmp_path: Path, registry: Registry, capsys: pytest.CaptureFixture[str]) -> None:
    """The unfinished run is listed, and starts over after a discard; its autosaves are set aside."""
    start(tmp_path, "runs/1", KillAt(3))
    [entry] = registry.entries()
    assert command_line(["list"]) == 0
    listed = capsys.readouterr().out
    assert listed.startswith(entry.run_id)
    assert "epoch 0, batch 3" in listed
    assert command_line(["list", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["runs"]
    assert (found["run_id"], found["directory"]) == (entry.run_id, entry.directory)
    assert command_line(["discard", entry.run_id]) == 0
    assert "superseded-0001-discarded" in capsys.readouterr().out
    assert registry.entries() == []
    assert command_line(["list"]) == 1
    assert command_line(["discard", entry.directory]) == 1
    assert command_line(["discard", "nobody"]) == 2
    assert start(tmp_path, "runs/1").exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10]


def test_discard_leaves_a_run_that_is_in_use(tmp_path: Path, registry: Registry) -> None:
    """A discard does not take the autosaves of a process that trains."""
    first = Script(lambda: train(tmp_path, "runs", Waits(tmp_path)))
    wait_for(tmp_path / "started")
    [entry] = registry.entries()
    assert run(lambda: os._exit(command_line(["discard", entry.run_id]))).exit_code == 1
    (tmp_path / "go").touch()
    assert first.wait().exit_code == 0


class Waits(Callback):
    """Waits in its second batch until it may continue."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            (self._directory / "started").touch()
            wait_for(self._directory / "go")


def wait_for(path: Path) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("root", ["runs/1", "runs/2"])
def test_second_start_waits_for_the_first_one(root: str, tmp_path: Path) -> None:
    """A second start waits while the first one ends, and then continues it."""
    first = Script(lambda: train(tmp_path, "runs/1", Waits(tmp_path)))
    wait_for(tmp_path / "started")
    threading.Timer(1.0, lambda: (os.kill(first.process_id, signal.SIGTERM), (tmp_path / "go").touch())).start()
    second = start(tmp_path, root, grace_seconds=30.0)
    assert first.wait().exit_code == 143
    assert second.exit_code == 0, second.output
    assert "Waiting up to 30 s for it to end" in second.output
    [[count, _]] = told(tmp_path, "told")
    assert count < 10


def test_second_copy_in_another_directory(tmp_path: Path) -> None:
    """A second copy that is started on purpose trains separately."""
    first = Script(lambda: train(tmp_path, "runs/1", Waits(tmp_path)))
    wait_for(tmp_path / "started")
    second = start(tmp_path, "runs/2", grace_seconds=0.5)
    (tmp_path / "go").touch()
    assert first.wait().exit_code == second.exit_code == 0
    assert f"process {first.process_id}" in second.output
    assert [count for count, _ in told(tmp_path, "told")] == [10, 10]


def test_named_place_is_that_place(tmp_path: Path) -> None:
    """With `dirpath` a run elsewhere is named, but not continued."""
    start(tmp_path, "runs/1", KillAt(3), dirpath=str(tmp_path / "saves-1"))
    ended = start(tmp_path, "runs/1", dirpath=str(tmp_path / "saves-2"))
    assert [count for count, _ in told(tmp_path, "told")] == [10]
    assert "An interrupted run of script.py" in ended.output


def test_several_fits_in_new_directories(tmp_path: Path) -> None:
    """Each fit of a script continues its own run, even if each has its own directory."""

    def main(number: int, *faults: Callback) -> None:
        for fold in range(2):
            killing = faults if fold == 1 else ()
            train(tmp_path, f"runs/{number}/fold-{fold}", *killing, rows=20 + 4 * fold)

    assert run(lambda: main(1, KillAt(3))).exit_code == -signal.SIGKILL
    assert run(lambda: main(2)).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10, 0, 12 - 3]
    assert autosaves(tmp_path) == []


def test_loop_that_skips_what_is_done(tmp_path: Path) -> None:
    """The interrupted fit is found by its start, and the next one is new."""

    def main(seeds: list[int], *faults: Callback) -> None:
        for seed in seeds:
            train(tmp_path, "runs", *(faults if seed == 2 else ()), seed=seed)

    assert run(lambda: main([1, 2, 3], KillAt(3))).exit_code == -signal.SIGKILL
    assert run(lambda: main([2, 3])).exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10, 7, 10]


def test_first_start_is_kept(tmp_path: Path, registry: Registry) -> None:
    """A run keeps the record of its first start, even if the weights differ at each start."""

    def train_without_a_seed(*faults: Callback) -> None:
        fit_net([protected(), *faults], tmp_path)

    starts = []
    for seed in (1, 2):
        run(lambda: train_without_a_seed(KillAt(3)), seed=seed)
        [entry] = registry.entries()
        starts.append(json.loads((Path(entry.directory) / "run.json").read_text())["fits"]["1"]["start"])
    assert starts[0] == starts[1]


def test_registry_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training continues without a registry, and reports that."""
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "registry"))
    ended = start(tmp_path, "runs")
    assert ended.exit_code == 0
    assert "The registry of runs can't be written" in ended.output


def test_no_registry_under_pytest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All fits of a test session have one command, so none continues another."""
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(tmp_path)
    start(tmp_path, "runs/1", KillAt(3))
    assert start(tmp_path, "runs/2").exit_code == 0
    assert [count for count, _ in told(tmp_path, "told")] == [10]
    assert not (tmp_path / FOLDER).exists()
