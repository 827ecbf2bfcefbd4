"""`run --from`: a new run from a kept autosave of another one, which stays as it is."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant.records.runs import RESUME_FROM_VARIABLE
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.cli.checkpoints import call
from tests.processes import Ended, run
from tests.rank_runs import RankNet, for_ranks, shuffled
from tests.runs import Net, fit_net
from tests.scripts import protection, tell, told, weights
from tests.sharded import ShardedNet, fsdp2


class Tuned(Net):
    """Has hyperparameters of each kind that a script changes."""

    def __init__(self, lr: float = 0.01, gamma: float = 0.9, name: str = "first") -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=self.hparams.gamma)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Rates(Callback):
    """Records the place and the learning rate of each batch."""

    def __init__(self, directory: Path, name: str) -> None:
        self._directory, self._name = directory, name

    def on_train_batch_start(self, trainer: Any, pl_module: object, batch: Any, batch_idx: int) -> None:
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        tell(self._directory, self._name, [trainer.current_epoch, batch_idx, rate, batch.tolist()])

    def on_fit_end(self, trainer: Any, pl_module: object) -> None:
        tell(self._directory, f"{self._name} weights", weights(trainer))


def script(
    directory: Path,
    *faults: Callback,
    name: str = "run",
    resume_from: Any = None,
    seed: int = 1,
    module: dict[str, Any] | None = None,
    **trainer: Any,
) -> Ended:
    """Run the script, which saves at each step and keeps the states of steps 3, 6, and 9."""

    def main() -> None:
        if resume_from is not None:
            os.environ[RESUME_FROM_VARIABLE] = str(resume_from)
        own = protection(every_n_train_steps=1, keep_every=3)
        best = ModelCheckpoint(dirpath=directory / "best", monitor="val_loss", save_last=True, filename="best")
        logger = CSVLogger(directory / "logs")
        callbacks = [*own, Rates(directory, name), best, *faults]
        more = {"enable_checkpointing": True, "logger": logger, **trainer}
        fit_net(callbacks, directory, module=Tuned(**(module or {})), **more)

    return run(main, seed=seed)


def contents(directory: Path) -> dict[str, bytes]:
    """Return the files of the runs so far, without what the tests record."""
    paths = (path for folder in ("fault_tolerance", "best", "logs") for path in (directory / folder).rglob("*"))
    return {str(path): path.read_bytes() for path in paths if path.is_file()}


def branches_of(directory: Path) -> list[str]:
    """Return the ends of the names of the runs that are branches."""
    names = (path.name for path in (directory / "fault_tolerance").iterdir())
    return sorted(name.partition("-from-")[2] for name in names if "-from-" in name)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two epochs that has finished."""
    directory = tmp_path_factory.mktemp("parent")
    ended = script(directory)
    assert ended.exit_code == 0, ended.output
    return directory


@pytest.fixture
def copied(parent: Path, tmp_path: Path) -> Path:
    """Return a copy of that directory."""
    return Path(shutil.copytree(parent, tmp_path / "parent"))


FILTERS = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
]


def test_an_unchanged_branch_repeats_the_parent(copied: Path) -> None:
    """From step 3, killed in between, it trains the same batches to the same weights; the parent's files stay."""
    before = contents(copied)
    first = script(copied, KillAt(3), name="branch", resume_from=3, seed=5)
    assert first.exit_code == -signal.SIGKILL, first.output
    assert "This run is a branch of script-" in first.output
    second = script(copied, name="branch", resume_from=3, seed=6)  # the same command: the branch continues
    assert second.exit_code == 0, second.output
    assert "-from-3/fit-1/autosave-" in second.output
    assert "Resumed exactly before batch 1 of epoch 1" in second.output
    places = [(epoch, batch) for epoch, batch, _, _ in told(copied, "branch")]
    assert places[:4] == [(0, 3), (0, 4), (1, 0), (1, 1)]
    once = {(epoch, batch): rest for epoch, batch, *rest in told(copied, "branch")}
    whole = {(epoch, batch): rest for epoch, batch, *rest in told(copied, "run")}
    assert once == {place: rest for place, rest in whole.items() if place >= (0, 3)}
    assert told(copied, "branch weights") == told(copied, "run weights")
    after = contents(copied)
    assert {path: after.get(path) for path in before} == before
    assert branches_of(copied) == ["3"]


def test_changed_settings_take_effect_and_are_listed(copied: Path, capsys: Any) -> None:
    """The new rate, at its place in the schedule, counts; history and report list each change, also after a kill."""
    changes = {"lr": 0.1, "gamma": 0.5, "name": "second"}
    for fault, code in ((KillAt(3), -signal.SIGKILL), (None, 0)):
        faults = [fault] if fault is not None else []
        ended = script(copied, *faults, name="branch", resume_from="1:1", module=changes, max_epochs=3)
        assert ended.exit_code == code, ended.output
    rates = [round(rate, 6) for _, _, rate, _ in told(copied, "branch")]
    assert rates[:4] == [0.081, 0.081, 0.081, 0.0405]
    assert told(copied, "branch")[-1][:2] == [2, 4]
    expected = [
        "hyperparameters.gamma: 0.9 when it was saved, 0.5 now",
        "hyperparameters.lr: 0.01 when it was saved, 0.1 now",
        "hyperparameters.name: 'first' when it was saved, 'second' now",
        "optimizers.0.lr: 0.01 when it was saved, 0.1 now",
        "StepLR.gamma: 0.9 when it was saved, 0.5 now",
        "trainer.max_epochs: 2 when it was saved, 3 now",
    ]
    [directory] = (copied / "fault_tolerance").glob("*-from-1-1")
    starts = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    parents = [line["parent"] for line in starts if line["event"] == "start"]
    assert len(parents) == 2
    assert all(sorted(one["changed"]) == sorted(expected) for one in parents)
    report = call(capsys, "report", directory).out
    assert "|--" in report or "`--" in report
    assert "(this run), from step 6 (batch 1 of epoch 1), finished" in report
    for line in expected:
        assert f"changed: {line}" in report
    assert "-from-1-1" in call(capsys, "report", copied).out
    whole = call(capsys, "report", str(directory).partition("-from-")[0], "--html", str(copied / "a.html")).out
    assert "(this run), finished" in whole
    assert "-from-1-1, from step 6" in (copied / "a.html").read_text()


def test_a_branch_of_a_branch_by_path(copied: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable takes a path, too; the tree has three levels, and the parent's autosave is not needed later."""
    assert script(copied, resume_from=3).exit_code == 0
    [kept] = (copied / "fault_tolerance").glob("*-from-3/fit-1/kept/*epoch=1-batch=4*")
    monkeypatch.setenv(RESUME_FROM_VARIABLE, str(kept))
    assert script(copied, KillAt(0), name="third", max_epochs=3).exit_code == -signal.SIGKILL
    shutil.rmtree(kept.parent.parent)  # all autosaves of the parent are gone
    ended = script(copied, name="third", max_epochs=3)
    assert ended.exit_code == 0, ended.output
    assert told(copied, "third")[0][:2] == [1, 4]
    report = call(capsys, "report", copied).out
    assert "    `-- script-" in report
    assert "(this run), from step 9 (batch 4 of epoch 1), finished" in report


@pytest.mark.parametrize("source", [4, "0:1"])
def test_a_step_that_is_not_kept_is_refused_with_those_that_are(copied: Path, source: Any) -> None:
    """The error lists the steps, and nothing remains."""
    refused = script(copied, resume_from=source)
    assert refused.exit_code == 1
    assert "There is no autosave of" in refused.output
    assert "There are autosaves of these steps (EPOCH:BATCH): 3 (0:3), 6 (1:1), 9 (1:4)." in refused.output
    assert branches_of(copied) == []


def test_without_a_parent_the_error_says_what_to_pass(tmp_path: Path) -> None:
    """A command that has no run has no steps either."""
    refused = script(tmp_path, resume_from=3)
    assert refused.exit_code == 1
    assert "no run of this command was found" in refused.output
    assert "name the path of an autosave" in refused.output


def test_a_plain_start_does_not_continue_a_branch(copied: Path) -> None:
    """Without the request, the command begins again, and an unfinished branch stays as it is."""
    assert script(copied, KillAt(2), name="branch", resume_from=3).exit_code == -signal.SIGKILL
    plain = script(copied, name="plain")
    assert plain.exit_code == 0, plain.output
    assert "Resumed" not in plain.output
    assert told(copied, "plain")[0][:2] == [0, 0]
    assert branches_of(copied) == ["3"]


def group(directory: Path, name: str, module: type[LightningModule], fault: Callback | None, **options: Any) -> int:
    """Run the script on two ranks, and return the exit code."""

    def main(rank: int) -> None:
        if "resume_from" in options:
            os.environ[RESUME_FROM_VARIABLE] = str(options.pop("resume_from"))
        strategy = options.pop("strategy", "ddp")
        callbacks = [*protection(every_n_train_steps=1, keep_every=3), *([fault] if fault is not None else [])]
        trainer = fit_net(callbacks, directory, module=module(), train=shuffled(), devices=2, strategy=strategy)
        metrics = {key: float(value).hex() for key, value in sorted(trainer.callback_metrics.items())}
        tell(directory, f"{name}-{rank}", metrics)

    outputs = [directory / f"{name}-{rank}.txt" for rank in range(2)]
    code = run_ranks(main, outputs=outputs, seed=1, timeout_seconds=100)
    assert code == 0 or fault is not None, outputs[0].read_text() + outputs[1].read_text()
    return code


@pytest.mark.slow
@pytest.mark.timeout(400)
@for_ranks[0]
@for_ranks[1]
@pytest.mark.parametrize("module", [RankNet, ShardedNet])
def test_two_ranks(tmp_path: Path, module: Any) -> None:
    """Both ranks begin and continue the branch, also from an autosave in shards."""

    def options() -> dict[str, Any]:
        return {"strategy": fsdp2()} if module is ShardedNet else {}

    assert group(tmp_path, "whole", module, None, **options()) == 0
    assert group(tmp_path, "branch", module, KillAt(4), resume_from=6, **options()) != 0
    assert group(tmp_path, "branch", module, None, resume_from=6, **options()) == 0
    for rank in range(2):
        assert told(tmp_path, f"branch-{rank}") == told(tmp_path, f"whole-{rank}")
    assert branches_of(tmp_path) == ["6"]


pytestmark = FILTERS
