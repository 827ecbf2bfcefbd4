"""A ``predict`` continues with a different number of ranks: each sample is predicted once, and comes back once."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.loader.remaining import Rest
from lightning_faulttolerant.trainer.evaluation import compat, evaluation_resume
from tests.groups import run_group
from tests.runs import make_trainer

WAYS = [(2, 1), (1, 2), (2, 3), (3, 2)]
ALWAYS = {"train_time_interval": timedelta(microseconds=1)}
"""An autosave before each batch that all ranks reach."""


class Rows(Dataset[tuple[int, Tensor]]):
    """A sample is its index and its row, with noise if that is wanted."""

    def __init__(self, length: int, *, noise: float = 0.0) -> None:
        self.rows = torch.linspace(-1, 1, length * 4).reshape(length, 4)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, self.rows[index] + (self.noise * torch.rand(4) if self.noise else 0.0)


class Net(LightningModule):
    """Predicts a value for each row, and returns the index with it."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        index, row = torch.as_tensor(batch[0]).reshape(-1), batch[1].reshape(-1, 4)
        return {"index": index, "value": self.layers(row).flatten(), "row": row}


class Kill(Callback):
    """Kills its rank at the start of a batch, or stops it. After that, batches take long enough for ranks to agree."""

    def __init__(self, batch: int, loader: int = 0, signum: int = signal.SIGKILL) -> None:
        self.at, self.signum = (loader, batch), signum

    def on_predict_batch_start(
        self, trainer: Trainer, module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if (dataloader_idx, batch_idx) == self.at:
            os.kill(os.getpid(), self.signum)
        elif (dataloader_idx, batch_idx) > self.at:
            time.sleep(0.5)


class Writer(BasePredictionWriter):
    """Writes a line for each call: the numbers and the indices of its batches, and the indices in the predictions."""

    def __init__(self, path: Path, interval: str) -> None:
        super().__init__(interval)  # type: ignore[arg-type]
        self.path = path

    def write(self, **entry: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def write_on_batch_end(
        self, trainer: Trainer, module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int,
        dataloader_idx: int,
    ) -> None:  # fmt: skip
        place = {"rank": trainer.global_rank, "loader": dataloader_idx, "batch": batch_idx}
        self.write(what="batch", **place, given=list(batch_indices), predicted=prediction["index"].tolist())

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        several = predictions if predictions and isinstance(predictions[0], list) else [predictions]
        predicted = [[one["index"].tolist() for one in of_loader] for of_loader in several]
        self.write(what="epoch", rank=trainer.global_rank, given=batch_indices, predicted=predicted)


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One start of the command: its number of ranks, and where each of them is killed."""

    num_ranks: int
    kill: Kill | None = None
    options: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What all starts have in common."""

    sizes: tuple[int, ...] = (26,)
    batch_size: int = 2
    num_workers: int = 0
    noise: float = 0.0
    interval: str = "batch_and_epoch"
    module: Callable[[], LightningModule] = Net
    options: dict[str, Any] = field(default_factory=lambda: {"elastic": True})
    arguments: dict[str, Any] = field(default_factory=dict)
    loader: dict[str, Any] = field(default_factory=dict)
    more: Callable[[Any], dict[str, Any]] = lambda data: {}
    returns: bool | None = None
    at_end: Callable[[Leg], None] = lambda leg: None


@dataclass(frozen=True)
class Done:
    """What the starts have written, and what the last one has returned on each rank."""

    output: str
    entries: list[list[dict[str, Any]]]
    returned: list[Any]

    @property
    def num_ranks(self) -> int:
        """The number of ranks of the last start."""
        return len(self.returned)

    def numbers(self) -> list[list[tuple[int, int]]]:
        """Return the loader and the number of each batch that a writer saw, for each start."""
        return [[(e["loader"], e["batch"]) for e in of_leg if e["what"] == "batch"] for of_leg in self.entries]

    def samples(self, loader: int = 0) -> list[int]:
        """Return the indices that writers saw for one loader, batch by batch, over all starts."""
        batches = (e for of_leg in self.entries for e in of_leg if e["what"] == "batch" and e["loader"] == loader)
        return [index for entry in batches for index in entry["predicted"]]


def run(plan: Plan, *legs: Leg, directory: Path) -> Done:
    """Run the starts one after the other."""
    entries, output = [], ""
    for number, leg in enumerate(legs):
        files = [directory / f"written-{number}-{rank}.jsonl" for rank in range(leg.num_ranks)]
        codes, output = run_group(
            lambda rank, leg=leg, files=files: predict(plan, leg, directory, files[rank]),  # type: ignore[misc]
            num_ranks=leg.num_ranks,
            directory=directory,
        )
        assert_ended(leg, codes, output)
        lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
        entries.append([json.loads(line) for line in lines])
    returned = [torch.load(directory / f"returned-{rank}.pt") for rank in range(legs[-1].num_ranks)]
    return Done(output, entries, returned)


def own_rank() -> int:
    """Return the rank of this process."""
    return int(os.environ.get("RANK", "0"))


def assert_ended(leg: Leg, codes: list[int], output: str) -> None:
    """Check the exit codes of the ranks. One that learns of the death of another ends with an error."""
    signum = 0 if leg.kill is None else leg.kill.signum
    expected = 143 if signum == signal.SIGTERM else -signum
    assert expected in codes, f"{codes}\n{output}"
    assert {*codes} <= {expected, 1 if signum == signal.SIGKILL else expected}, f"{codes}\n{output}"


def predict(plan: Plan, leg: Leg, directory: Path, written: Path) -> None:
    """Predict on one rank."""
    torch.manual_seed(100 + own_rank())
    usual = {"batch_size": plan.batch_size, "num_workers": plan.num_workers}
    data = [Rows(size, noise=plan.noise) for size in plan.sizes]
    loaders = [DataLoader(one, **{**usual, **plan.loader, **leg.loader, **plan.more(one)}) for one in data]
    callbacks: list[Callback] = [Writer(written, plan.interval), *([] if leg.kill is None else [leg.kill])]
    options = {**ALWAYS, "dirpath": directory / "autosaves", "run_id": "run", **plan.options, **leg.options}
    ranks = {"devices": leg.num_ranks, "strategy": "ddp" if leg.num_ranks > 1 else "auto"}
    trainer = make_trainer([*callbacks, FaultTolerance(**options)], directory, **{**ranks, **plan.arguments})
    given = loaders if len(loaders) > 1 else loaders[0]
    found = trainer.predict(plan.module(), given, return_predictions=plan.returns)
    torch.save(found, directory / f"returned-{trainer.global_rank}.pt")
    plan.at_end(leg)


def returned(done: Done, loader: int, num_loaders: int) -> Iterator[dict[str, Tensor]]:
    """Yield the predictions of a loader that the last start has returned, on all ranks."""
    for of_rank in done.returned:
        yield from of_rank if num_loaders == 1 else of_rank[loader]


def assert_returned_once(plan: Plan, done: Done) -> None:
    """Check what the last start has returned on all ranks."""
    net = plan.module().eval()
    for loader, size in enumerate(plan.sizes):
        predictions = list(returned(done, loader, len(plan.sizes)))
        index, value, row = (torch.cat([one[name] for one in predictions]) for name in ("index", "value", "row"))
        assert sorted(index.tolist()) == list(range(size))
        if not plan.noise:
            torch.testing.assert_close(row, Rows(size).rows[index], rtol=0, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(value, net.layers(row).flatten())


def assert_written_once(plan: Plan, done: Done) -> None:
    """Check what writers saw in all starts, and what they were given at the end."""
    if plan.interval != "epoch":
        for loader, size in enumerate(plan.sizes):
            assert sorted(done.samples(loader)) == list(range(size))
    for earlier, later in itertools.combinations(done.numbers(), 2):
        assert not set(earlier) & set(later)  # files that a writer names by batch are not overwritten
    for entry in (entry for of_leg in done.entries for entry in of_leg):
        assert entry["given"] == entry["predicted"], entry
    if plan.interval != "batch":
        at_end = [entry for entry in done.entries[-1] if entry["what"] == "epoch"]
        assert len(at_end) == done.num_ranks
        for loader, size in enumerate(plan.sizes):
            found = [index for entry in at_end for batch in entry["given"][loader] for index in batch]
            assert sorted(found) == list(range(size))


def assert_each_sample_once(plan: Plan, done: Done) -> None:
    """Check that each sample is predicted, given to writers, and returned once."""
    assert_written_once(plan, done)
    assert_returned_once(plan, done)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_another_number_of_ranks(way: tuple[int, int], signum: int, tmp_path: Path) -> None:
    """Each sample is predicted once, whoever predicts it; writers get the indices of their batches."""
    plan = Plan(sizes=(49,))
    done = run(plan, Leg(num_ranks=way[0], kill=Kill(3, signum=signum)), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_each_sample_once(plan, done)
    first = min(entry["batch"] for entry in done.entries[1] if entry["what"] == "batch")
    assert f"Resumed NOT EXACTLY before batch {first} of predict" in done.output, done.output
    assert first == 3 or (signum == signal.SIGTERM and first > 3)  # to agree takes a moment
    assert (
        f"{ranks(way[0])} when it was saved, {ranks(way[1])} now: batches consist of different samples" in done.output
    )


def ranks(number: int) -> str:
    """Return a number of ranks in words."""
    return "one rank" if number == 1 else f"{number} ranks"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_many_starts(num_workers: int, tmp_path: Path) -> None:
    """The number of ranks changes again and again, and stays in between: then nothing more becomes inexact."""
    plan = Plan(sizes=(61,), num_workers=num_workers, noise=1.0)
    legs = [Leg(num_ranks=2, kill=Kill(3)), Leg(num_ranks=3, kill=Kill(5)), Leg(num_ranks=3, kill=Kill(6))]
    done = run(plan, *legs, Leg(num_ranks=1), directory=tmp_path)
    assert_each_sample_once(plan, done)
    assert [min(number for _, number in of_leg) for of_leg in done.numbers()] == [0, 3, 5, 6]
    pattern = re.compile(r"Resumed NOT EXACTLY before batch 5 of predict[^\n]*\n  NOT EXACT ([^\n]*)")
    [reasons] = [text for path in tmp_path.glob("*.txt") for text in pattern.findall(path.read_text())]
    assert all(text.startswith("since it resumed before batch 3 of predict: ") for text in reasons.split("; "))
    rows = torch.cat([one["row"] for one in returned(done, 0, 1)])
    noise = rows - Rows(61).rows[torch.cat([one["index"] for one in returned(done, 0, 1)])]
    assert len({tuple(values) for values in noise.tolist()}) == 61  # no rank or worker repeats another one's draws


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("at", [(1, 0), (2, 1), (1, 2)], ids=str)
def test_loaders_in_which_ranks_are_apart(at: tuple[int, int], way: tuple[int, int], tmp_path: Path) -> None:
    """One rank has a batch less in the first loader, so it is ahead of the other in the second one."""
    plan = Plan(sizes=(9, 31, 5))
    kill = Kill(at[0], loader=at[1]) if at[1] < 2 else Kill(at[0] - 1, loader=at[1])
    done = run(plan, Leg(num_ranks=way[0], kill=kill), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_returned_once(plan, done)
    assert "Resumed NOT EXACTLY" in done.output


@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_writers(interval: str, way: tuple[int, int], tmp_path: Path) -> None:
    """A writer of either interval, with nothing returned."""
    plan = Plan(interval=interval, returns=False)
    done = run(plan, Leg(num_ranks=way[0], kill=Kill(2)), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_written_once(plan, done)
    assert done.returned == [None] * way[1]
    assert "Resumed NOT EXACTLY before batch 2 of predict" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("way", [(2, 1), (1, 2)], ids=str)
def test_batches_since_the_last_autosave(way: tuple[int, int], tmp_path: Path) -> None:
    """They are predicted again, in other batches, and returned once."""
    plan = Plan(options={"elastic": True, "train_time_interval": timedelta(hours=1)})
    done = run(plan, Leg(num_ranks=way[0], kill=Kill(3)), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_returned_once(plan, done)
    assert sorted(done.samples()) == sorted([*range(26), *range(3 * 2 * way[0])])
    assert "Resumed NOT EXACTLY before batch 0 of predict" in done.output


class KillAtStart(Kill):
    """Kills its rank before anything is saved."""

    def on_predict_start(self, *_: Any) -> None:
        os.kill(os.getpid(), self.signum)


def test_before_the_first_autosave(tmp_path: Path) -> None:
    """Nothing is saved yet, so everything is predicted by the ranks that start next."""
    done = run(Plan(), Leg(num_ranks=2, kill=KillAtStart(99)), Leg(num_ranks=3), directory=tmp_path)
    assert_each_sample_once(Plan(), done)
    assert "Resumed" not in done.output


@pytest.mark.slow
@pytest.mark.parametrize("way", [(2, 1), (2, 3)], ids=str)
def test_a_finished_one(way: tuple[int, int], tmp_path: Path) -> None:
    """A finished predict is not run again: its predictions come back on the ranks that start next."""

    def die(leg: Leg) -> None:
        if leg.kill is not None:
            os.kill(os.getpid(), leg.kill.signum)

    plan = Plan(sizes=(21, 9), at_end=die)
    done = run(plan, Leg(num_ranks=way[0], kill=Kill(99)), Leg(num_ranks=way[1]), directory=tmp_path)
    assert_returned_once(plan, done)
    assert done.entries[1] == [], done.output
    assert "after the end of predict" in done.output
    assert "now: each rank also returns predictions of other ranks" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_seeded_samples(num_workers: int, way: tuple[int, int], tmp_path: Path) -> None:
    """With seeded samples, each one has the same augmentation for any number of ranks."""
    plan = Plan(options={"worker_rng": "per_sample"}, noise=1.0, num_workers=num_workers)
    legs = [Leg(num_ranks=way[0], kill=Kill(2)), Leg(num_ranks=way[1], kill=Kill(3)), Leg(num_ranks=way[1])]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = run(plan, Leg(num_ranks=1), directory=tmp_path / "whole")
    done = run(plan, *legs, directory=tmp_path / "killed")
    assert_each_sample_once(plan, done)
    rows = []
    for one in (whole, done):
        found = list(returned(one, 0, 1))
        index, row = (torch.cat([each[name] for each in found]) for name in ("index", "row"))
        rows.append(row[index.argsort()])
    torch.testing.assert_close(rows[1], rows[0], rtol=0, atol=0)


class OwnBatches(BatchSampler):
    """A batch sampler of the user's."""


class AdaptsNet(Net):
    """Takes the mean of each batch."""

    def on_predict_model_eval(self) -> None:
        self.train()


class CountsNet(Net):
    """Keeps the indices of its rank."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Tensor]:
        self.seen += batch[0].tolist()
        return super().predict_step(batch, batch_idx, dataloader_idx)


@pytest.mark.slow
def test_ranks_without_a_batch(tmp_path: Path) -> None:
    """One sample is left for three ranks, and then for two. Those without a batch return what they took over."""
    plan = Plan(sizes=(9,))
    legs = [Leg(num_ranks=1, kill=Kill(4)), Leg(num_ranks=3, kill=Kill(4)), Leg(num_ranks=2)]
    done = run(plan, *legs, directory=tmp_path)
    assert_returned_once(plan, done)
    assert [len(of_rank) for of_rank in done.returned] == [5, 0]
    assert "Resumed NOT EXACTLY before batch 4 of predict" in done.output


UNLIKE = {
    "not elastic": (Plan(options={}), {}, "the number of ranks is 1, but was 2 in "),
    "shuffled": (Plan(loader={"shuffle": True}), {}, "has a different order than Lightning's own sampler"),
    "shuffled now": (Plan(), {"shuffle": True}, "has a different order than Lightning's own sampler"),
    "batch sampler": (
        Plan(loader={"batch_size": 1, "batch_sampler": OwnBatches(range(26), 2, drop_last=False)}),
        {},
        "has a different order than Lightning's own sampler",
    ),
    "no batches": (Plan(loader={"batch_size": None}), {}, "has a different order than Lightning's own sampler"),
    "limited": (Plan(arguments={"limit_predict_batches": 6}), {}, "limit_predict_batches=6 counts the batches of one"),
    "limited to one": (Plan(arguments={"limit_predict_batches": 1}), {}, "limit_predict_batches=1 counts the batches"),
    "batch norm": (Plan(module=AdaptsNet), {}, "a batch norm takes the mean of each batch"),
    "apart": (Plan(module=CountsNet), {}, "its ranks have different values of module.seen"),
}


@pytest.mark.filterwarnings("ignore:Your `predict_dataloader`'s sampler has shuffling enabled")
@pytest.mark.filterwarnings("ignore:You are using a custom batch sampler")
@pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices")
@pytest.mark.parametrize("name", UNLIKE)
def test_what_starts_over(name: str, tmp_path: Path) -> None:
    """Where continuing could lose a sample or change a prediction, predict runs from its start, and says so."""
    plan, now, reason = UNLIKE[name]
    plan = replace(plan, interval="batch")
    kill = Kill(0 if name == "limited to one" else 2)
    done = run(plan, Leg(num_ranks=2, kill=kill), Leg(num_ranks=1, loader=now), directory=tmp_path)
    assert "Resumed" not in done.output
    assert "This predict starts over: " in done.output, done.output
    assert reason in done.output, done.output
    again = [index for entry in done.entries[1] for index in entry["predicted"]]
    assert sorted(again) == list(range({"limited": 12, "limited to one": 2}.get(name, 26)))


@pytest.mark.slow
def test_seeded_samples_of_ranks_in_different_loaders(tmp_path: Path) -> None:
    """Their seeds can't continue, so predict runs from its start: each sample is returned with its own noise."""
    plan = Plan(sizes=(9, 31), options={"worker_rng": "per_sample"}, noise=1.0)
    legs = Leg(num_ranks=2, kill=Kill(2, loader=1)), Leg(num_ranks=1)
    done = run(plan, *legs, directory=tmp_path)
    assert_returned_once(plan, done)
    assert "its ranks were in different loaders, so the seeds of its samples can't be continued" in done.output


@pytest.mark.slow
def test_a_list_of_one_rank(tmp_path: Path) -> None:
    """What one rank keeps in its objects is on all ranks afterwards, and the report says so."""
    plan = Plan(module=CountsNet)
    done = run(plan, Leg(num_ranks=1, kill=Kill(2)), Leg(num_ranks=2), directory=tmp_path)
    assert_each_sample_once(plan, done)
    assert "NOT EXACT all ranks have the values of rank 0 in module.seen" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["lost", "again", "numbers", "returned"])
def test_a_broken_deal(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control: a deal that loses samples, or deals them again, or numbers batches again, is found."""
    if broken == "numbers":
        monkeypatch.setattr(compat, "count_from", lambda loop, first, patches: None)
    elif broken == "returned":
        monkeypatch.setattr(evaluation_resume, "_joined_predictions", lambda states: states[0])
    else:
        positions = Rest.positions
        lost = lambda self: positions(self)[1:] if self.consumed else positions(self)  # noqa: E731
        monkeypatch.setattr(Rest, "positions", lost if broken == "lost" else lambda self: torch.arange(self.length))
    done = run(Plan(), Leg(num_ranks=2, kill=Kill(2)), Leg(num_ranks=1), directory=tmp_path)
    with pytest.raises(AssertionError):
        assert_each_sample_once(Plan(), done)


class OfOneRank(SequentialSampler):
    """The order of all ranks but one."""


@pytest.mark.slow
def test_one_rank_that_has_another_order(tmp_path: Path) -> None:
    """If one of the ranks that start next has another sampler, all start over, and count batches from 0."""

    def sampler(data: Any) -> dict[str, Any]:
        return {"sampler": OfOneRank(data) if os.environ.get("WORLD_SIZE") == "3" and own_rank() == 1 else None}

    plan = Plan(more=sampler, interval="batch")
    done = run(plan, Leg(num_ranks=2, kill=Kill(2)), Leg(num_ranks=3), directory=tmp_path)
    assert_returned_once(plan, done)
    assert "This predict starts over: another rank can't continue it" in done.output, done.output
    assert min(number for _, number in done.numbers()[1]) == 0
