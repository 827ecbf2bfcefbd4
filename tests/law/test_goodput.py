"""What a run tells of its time: waiting for data, slow ranks, and failures that set the pace."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli import main
from lightning_faulttolerant.records.accounting import chapter_report
from lightning_faulttolerant.supervision.heartbeats import TRAINING_BATCH, ProcessHeartbeat, SectionTimes
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.histories import chapter_of, lines_of
from tests.processes import run
from tests.rank_runs import for_ranks, rank_here
from tests.runs import Net, fit_net
from tests.scripts import tell, told

pytestmark = for_ranks

SECONDS = 0.4
"""What the slow rank loses in each batch. On a busy machine, the rest of a batch may take as long."""


class SlowDataset(NoisyDataset):
    """Data that takes long on one rank.

    Args:
        num: The number of samples.
        slow_rank: The rank; ``None`` for none.
    """

    def __init__(self, num: int, slow_rank: int | None) -> None:
        super().__init__(num)
        self.slow_rank = slow_rank

    def __getitem__(self, index: int) -> Any:
        time.sleep(SECONDS / 2 if rank_here() == self.slow_rank else 0.0)
        return super().__getitem__(index)


class SlowNet(Net):
    """A model whose steps, or validation, take longer on rank 1; or with "none", as long on both ranks."""

    def __init__(self, section: str) -> None:
        super().__init__()
        self.section = section

    def _wait(self, section: str) -> None:
        is_slow = self.section == "none" or (self.section == section and self.global_rank == 1)
        time.sleep(SECONDS if is_slow else 0.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._wait("step")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._wait("evaluation")
        super().validation_step(batch, batch_idx)


class SlowState(Callback):
    """Takes a while to return its state on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        time.sleep(SECONDS if rank_here() == 1 else 0.0)
        return {"state": 1}


def slow_in_history(directory: Path, section: str) -> list[tuple[int, str]]:
    """Train on two ranks, one of them slow in a section; return which ranks the history names, and where."""

    def fit(_: int) -> None:
        data = SlowDataset(2 * 2 * 4, 1 if section == "data" else None)
        fit_net(
            [FaultTolerance(directory, every_n_train_steps=1), *([SlowState()] if section == "save" else [])],
            directory / "root",
            train=DataLoader(data, batch_size=2),
            validation=DataLoader(NoisyDataset(4), batch_size=2),
            module=SlowNet(section),
            max_epochs=1,
            devices=2,
            strategy="ddp",
            val_check_interval=1 if section == "evaluation" else 4,
            limit_val_batches=1 if section == "evaluation" else 0,
            num_sanity_val_steps=0,
        )

    outputs = [directory.parent / f"rank-{rank}.txt" for rank in range(2)]
    assert run_ranks(fit, outputs=outputs, seed=1, timeout_seconds=60) == 0, outputs[0].read_text()
    return [(each["rank"], each["section"]) for line in lines_of(directory) for each in line.get("slow", ())]


@pytest.mark.parametrize("section", ["data", "step", "evaluation", "save"])
def test_slow_rank_and_its_section_are_named(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that is slow in its data, step, evaluation, or saves is named with that, and no other rank is."""
    found = slow_in_history(tmp_path / "runs", section)
    assert found
    assert set(found) == {(1, section)}
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "Rank 1 was " in capsys.readouterr().out


def test_equal_ranks_are_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The negative control: no rank is slow, although rank 0 writes all files."""
    assert slow_in_history(tmp_path / "runs", "none") == []
    assert main(["report", str(tmp_path / "runs")]) == 0
    assert "slower" not in capsys.readouterr().out


def test_seconds_of_waiting_for_data_are_in_the_account(tmp_path: Path) -> None:
    """Batches that take 0.1 s to load are told apart from training, up to the state that counts."""

    class Slow(NoisyDataset):
        def __getitem__(self, index: int) -> Any:
            time.sleep(0.05)
            return super().__getitem__(index)

    def script(*faults: Callback) -> None:
        fit_net(
            [FaultTolerance(tmp_path, every_n_train_steps=4), *faults],
            tmp_path / "root",
            train=DataLoader(Slow(16), batch_size=2),
            max_epochs=1,
            limit_val_batches=0,
        )

    run(lambda: script(KillAt(6)))
    assert run(script).exit_code == 0
    account = chapter_report(chapter_of(tmp_path)).account
    assert 0.75 <= account.data < 1.2  # four batches before the kill, and four after it
    assert account.training < 4


def test_failures_of_the_history_set_the_pace(tmp_path: Path) -> None:
    """A kill counts, a stop that saved does not, and a budget of the user's own has precedence."""

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            [callback] = [each for each in trainer.callbacks if isinstance(each, FaultTolerance)]
            tell(tmp_path, "failures", callback._session.autosaver.pace.budget.failures.number)

    def script(*callbacks: Callback, **options: Any) -> None:
        fit_net([FaultTolerance(tmp_path / "runs", **options), *callbacks], tmp_path)

    stop = KillAt(1, signum=signal.SIGTERM)
    run(lambda: script(stop))
    run(lambda: script(Looks(), KillAt(1)))
    run(lambda: script(Looks(), stop, overhead_budget=0.01))
    run(lambda: script(Looks(), stop))
    assert told(tmp_path, "failures") == [0, 0, 0, 1, 1]


def test_hang_that_ended_a_process_is_told_by_the_next_start(tmp_path: Path) -> None:
    """What the watcher has noted next to the autosaves becomes a separate part of the account."""

    def script(*faults: Callback) -> None:
        fit_net([FaultTolerance(tmp_path / "runs", every_n_train_steps=1), *faults], tmp_path)

    run(lambda: script(KillAt(3)))
    hung = SectionTimes()
    [history] = (tmp_path / "runs").glob("*/history.jsonl")
    hung.follow(str(history.parent))
    time.sleep(1.0)
    heartbeat = ProcessHeartbeat(
        process_id=1,
        count=1,
        section=TRAINING_BATCH,
        epoch=0,
        batch=3,
        evaluated=-1,
        saved=None,
        rank=0,
        num_ranks=1,
        hang=0,
        hang_timeout_seconds=0.0,
        directory="",
    )
    hung.note_hang(heartbeat, 0.5)
    hung.writing()()
    assert run(script).exit_code == 0
    account = chapter_report(chapter_of(tmp_path / "runs")).account
    assert account.hung == pytest.approx(0.5, abs=0.01)
    assert account.down >= 0.5
