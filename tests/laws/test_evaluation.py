"""The law of evaluations: ``validate``, ``test``, ``predict``, and validation runs in a fit, cut at any batch."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter, EarlyStopping, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import CombinedLoader
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, SumMetric

from lightning_faulttolerant.records.accounting import chapter_report
from lightning_faulttolerant.testing import leave_out_part
from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset, Stream
from tests.laws.events import different_names, digest
from tests.laws.features.drawn_data import SplitInsideConcatenation
from tests.laws.files import contents
from tests.laws.ranks import FOR_RANKS, Slowly, fsdp2, rank_here
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Script, Training, assert_continues, assert_same
from tests.ledgers import chapter_of
from tests.messages import plain

# Lightning's advice: evaluations that shuffle must continue, too.
pytestmark = [
    *FOR_RANKS,
    pytest.mark.filterwarnings("ignore:Your `(val|test|predict)_dataloader`'s sampler has shuffling enabled"),
    pytest.mark.filterwarnings("ignore:Couldn't infer the batch indices"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size` from an ambiguous collection"),
]

TERM, KILL = signal.SIGTERM, signal.SIGKILL
STAGES = ("fit", "validate", "test", "predict")
ALWAYS = {"every_n_train_steps": None, "train_time_interval": timedelta(microseconds=1)}
"""An autosave before each batch."""
RARELY = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}
"""An autosave before the first batch, and at a stop."""


class Judge(Net):
    """Draws in each step; keeps its results in a list, a metric, and logged values; counts the calls of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # an evaluation with other weights would be another one
            torch.manual_seed(3)
            self.layers = Net().layers
        self.metric = MeanMetric()
        self.outputs: list[float] = []
        self.calls: list[str] = []

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        value = self.loss(batch).detach() + torch.rand(())
        self.outputs.append(value.item())
        self.metric.update(value)
        self.log("judged", value, on_step=True, on_epoch=True)
        self.log("metric", self.metric)
        return value

    validation_step = test_step

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        return {"value": self.layers(batch).flatten() + torch.rand(()), "batch": (batch_idx, dataloader_idx)}

    def on_test_start(self) -> None:
        self.calls.append("start")

    def on_test_epoch_start(self) -> None:
        self.calls.append("epoch start")

    def on_test_epoch_end(self) -> None:
        self.log("listed", sum(self.outputs) / max(len(self.outputs), 1))
        for name in ("start", "epoch start"):
            self.log(f"num {name}", float(self.calls.count(name)))
        self.outputs.clear()

    on_validation_start = on_predict_start = on_test_start
    on_validation_epoch_start = on_predict_epoch_start = on_test_epoch_start
    on_validation_epoch_end = on_test_epoch_end


class Adapts(Judge):
    """Adapts its batch norms to the data of evaluations, with its dropout on."""

    def on_test_model_eval(self) -> None:
        self.train()

    on_validation_model_eval = on_predict_model_eval = on_test_model_eval


class Replaces(Judge):
    """Has a buffer that each step replaces, in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * batch.mean()
        return super().test_step(batch, batch_idx, dataloader_idx) + self.mean

    validation_step = test_step


class Begins(Judge):
    """Draws, prints, and changes itself, its class, and its data when an evaluation begins. One layer is lazy."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.lazy = nn.LazyLinear(2)

    def on_test_start(self) -> None:
        super().on_test_start()
        print(f"with {len(self.outputs)} values")
        self.outputs.clear()
        self.noise = float(torch.rand(())) + random.random()
        type(self).scale += 0.1
        self.layers[1].train()
        self.layers[0].weight.requires_grad_(not self.layers[0].weight.requires_grad)
        self.layers[0].bias.data.mul_(1.1)
        self.register_buffer("late", torch.rand(2), persistent=False)
        (self.trainer.val_dataloaders or self.trainer.test_dataloaders).dataset.rows += 1

    on_validation_start = on_test_start

    def loss(self, batch: Tensor) -> Tensor:
        by_start = self.noise + self.late.sum() if hasattr(self, "late") else 0
        return (
            super().loss(batch) * self.scale + by_start + self.lazy(batch).mean() + self.layers[0].weight.requires_grad
        )


class Writer(BasePredictionWriter):
    """Writes one file for each batch, and one at the end."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(self, trainer: Trainer, module: Any, prediction: Any, given: Any, *batch: Any) -> None:
        path = Path(f"written-{trainer.global_rank}-{batch[2]}-{batch[1]}.txt")
        path.write_text(digest(prediction, list(given)))

    def write_on_epoch_end(self, trainer: Trainer, module: Any, predictions: Any, batch_indices: Any) -> None:
        text = f"{digest(predictions)} {list(batch_indices)}"
        Path(f"written-{trainer.global_rank}.txt").write_text(text)


def two_loaders(num_workers: int = 0) -> list[DataLoader[Tensor]]:
    """Return a loader of 5 batches and one of 3, which shuffles."""
    return [rows_of(20, shuffle=False, num_workers=num_workers)(), rows_of(12, num_workers=num_workers)()]


def listens() -> list[Callback]:
    """Return callbacks that use what a validation run logs."""
    best = ModelCheckpoint(monitor="listed", save_top_k=2, filename="{epoch}-{listed:.3f}")
    return [best, EarlyStopping("listed", patience=2)]


PERSISTENT = rows_of(20, shuffle=True, num_workers=2, persistent_workers=True)
CASES: dict[str, tuple[Row, ...]] = {
    "one": (
        Row(name="judge", module=Judge, validation=rows_of(20, shuffle=False)),
        Row(name="bar", trainer={"enable_progress_bar": True}),
    ),
    "two": (
        Row(name="adapts", module=Adapts, data=SplitInsideConcatenation),
        Row(name="logger", trainer={"logger": lambda: CSVLogger(".", version=0, flush_logs_every_n_steps=1)}),
        Row(name="writer", callbacks=Writer),
    ),
    "two with workers": (Row(name="judge", module=Judge, validation=lambda: two_loaders(2)),),
    "persistent workers": (
        Row(name="replaces", module=Replaces, validation=PERSISTENT),
        Row(name="window", trainer={"accumulate_grad_batches": 3, "val_check_interval": 2}),
        Row(name="rich", callbacks=RichProgressBar, trainer={"enable_progress_bar": True}),
    ),
    "without a length": (
        Row(name="judge", module=Judge, validation=lambda: DataLoader(Stream(20), batch_size=2, num_workers=2)),
        Row(name="writer", callbacks=Writer),
        Row(name="listens", callbacks=listens, trainer={"enable_checkpointing": True, "limit_val_batches": 4}),
    ),
    "begins": (Row(name="begins", module=Begins, validation=rows_of(20, shuffle=False)),),
    "together": (Row(name="judge", module=Judge, validation=lambda: CombinedLoader(two_loaders(), "max_size_cycle")),),
}
QUICK = [("one", "validate"), ("two", "test"), ("two", "predict"), ("persistent workers", "fit"), ("begins", "fit")]
SLOW = [
    ("begins", "test"), ("two", "fit"), ("two with workers", "fit"), ("persistent workers", "test"),
    ("without a length", "fit"), ("without a length", "predict"), ("together", "fit"), ("together", "test"),
]  # fmt: skip


def group_of(*rows: Row, **options: Any) -> Group:
    """Return the group of rows that saves before each batch."""
    return Group(rows=(*rows, Row(name="always", options={**ALWAYS, **options})))


def inside(batch: int, *, by: int = TERM, loader: int = 0, epoch: int = 0, stage: str = "", **more: Any) -> Cut:
    """Return a cut at the start of a batch of an evaluation."""
    return Cut(at=(epoch, 0), hook="validation", inside=(loader, batch), by=by, stage=stage, **more)


def cuts_of(case: str, stage: str) -> list[Cut]:
    """Return cuts of each kind, in the order of the run."""
    last = {"loader": 1, "batch": 1} if case.startswith("two") and stage != "fit" else {"batch": 2}
    if stage == "fit":
        return [inside(0), inside(3, by=KILL), inside(3, by=0), inside(**last, by=KILL, epoch=1)]
    ends = Cut(at=(0, 0), hook="validation end", by=KILL)
    return [inside(0), inside(1, by=KILL), inside(1, by=0), inside(**last), ends]


def num_evaluated(events: list[dict[str, Any]]) -> int:
    """Return how many batches of evaluations there are."""
    return sum(event["kind"] == "evaluated" for event in events)


def evaluates(
    group: Group, stage: str | Script, cuts: list[Cut], root: Path, *, repeats: int | None = None, num_ranks: int = 1
) -> None:
    """Check the law: with cuts, a run does and returns what it does without, and leaves the same files.

    A stop repeats no batch of an evaluation, and a kill or a failure repeats at most the batch that it ends, unless
    `repeats` says how many are repeated in all.
    """
    plain, training = (
        Training(group=group, root=root / name, stage=stage, num_ranks=num_ranks, with_callback=name == "cut")
        for name in ("plain", "cut")
    )
    whole = plain.finished().events
    assert_continues(whole, training, cuts)
    again = sum(num_evaluated(start.events[0]) for start in training.starts) - num_evaluated(whole[0])
    if repeats is None:
        assert 0 <= again <= num_ranks * sum(cut.by != TERM for cut in cuts)  # a rank may be ahead of the other
    else:
        assert again == repeats
    assert contents(root / "cut") == contents(root / "plain")


@pytest.mark.parametrize(("case", "stage"), [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)])
def test_evaluation_continues(case: str, stage: str, tmp_path: Path) -> None:
    """Stopped, killed, and failed in any batch, an evaluation continues at it, and returns the same."""
    evaluates(group_of(*CASES[case]), stage, cuts_of(case, stage), tmp_path)


class InShards(Judge):
    def configure_model(self) -> None:
        for layer in (self.layers[0], self.layers[1], self.layers[3], self.layers):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def uneven() -> DataLoader[Tensor]:
    """Return a loader that has more batches on rank 1."""
    return rows_of(40 + 12 * rank_here(), shuffle=False)()


def of_ranks(module: type[Net], validation: Callable[[], Any] | None = None, **trainer: Any) -> Group:
    """Return a group of ranks, which is slow, so that they agree on a stop within the next batches."""
    validation = validation or rows_of(240, shuffle=False)
    row = Row(name="ranks", module=module, validation=validation, trainer=trainer)
    return group_of(row, Row(name="slowly", callbacks=Slowly))


KILLED, STOP = inside(1, by=KILL), inside(2, rank=1)  # ranks may agree on a much later batch to stop at
UNEVEN = of_ranks(Judge, uneven, use_distributed_sampler=False)
IN_SHARDS = of_ranks(InShards, strategy=fsdp2())


@pytest.mark.parametrize(
    ("group", "stage", "cuts"),
    [
        pytest.param(of_ranks(Judge), "test", [KILLED, STOP], id="two ranks"),
        pytest.param(UNEVEN, "predict", [KILLED, STOP], id="uneven", marks=pytest.mark.slow),
        pytest.param(IN_SHARDS, "predict", [STOP], id="shards", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_evaluation_on_ranks(group: Group, stage: str, cuts: list[Cut], tmp_path: Path) -> None:
    """Ranks stop before the same batch, or save before common ones, and each continues with its own state."""
    evaluates(group, stage, cuts, tmp_path, num_ranks=2)


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_stops_alone_repeat_nothing(stage: str, tmp_path: Path) -> None:
    """Where nothing is saved but at a stop, no batch of an evaluation comes twice, by whatever signal."""
    options = {**RARELY, "stop_signals": ("SIGTERM", "SIGINT", "SIGUSR1")}
    cuts = [inside(0), inside(1, by=signal.SIGINT), inside(3, by=signal.SIGUSR1)]
    if stage == "fit":
        cuts = [*cuts, inside(4)]
    evaluates(group_of(*CASES["one"], **options), stage, cuts, tmp_path, repeats=0)


class Fails(Judge):
    def test_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        if batch_idx == 3:
            raise ValueError("no such sample")
        return super().test_step(batch, batch_idx, dataloader_idx)


def catches(trainer: Trainer, module: LightningModule, group: Group) -> object:
    """Test with a failure that is caught, and predict."""
    with contextlib.suppress(ValueError):
        trainer.test(module, rows_of(20, shuffle=False)())
    return trainer.predict(module, rows_of(20, shuffle=False)())


def fits_again(trainer: Trainer, module: LightningModule, group: Group) -> object:
    """Fit for an epoch, evaluate the best checkpoint, and fit for another one, which replaces it."""
    results = []
    for trainer.fit_loop.max_epochs in (1, 2):
        trainer.fit(module, **group.data())
        results.append(trainer.test(module, rows_of(20, shuffle=False)(), ckpt_path="best"))
    return results


SCRIPTS: dict[str, tuple[str | Script, tuple[Row, ...], list[Cut]]] = {
    "catches a failure": (catches, (Row(name="fails", module=Fails),), [inside(2, by=KILL, stage="predict")]),
    "fits again": (
        fits_again,
        (
            Row(name="judge", module=Judge, trainer={"enable_checkpointing": True}),
            Row(name="checkpoints", callbacks=lambda: ModelCheckpoint(dirpath="kept")),
        ),
        [inside(3, by=KILL, stage="test"), inside(1, by=KILL, stage="test")],
    ),
    "all functions": (
        "validate+fit+test+predict+test",
        # Else Lightning refuses a fit after an evaluation: its metric is of inference mode.
        (
            Row(name="replaces", module=Replaces, validation=two_loaders, trainer={"inference_mode": False}),
            CASES["two"][1],
        ),
        [
            inside(2, by=KILL, stage="validate"), inside(2, by=KILL, stage="fit"), Cut(at=(1, 1), by=TERM),
            inside(2, stage="test"), inside(2, by=KILL, stage="predict"),
            Cut(at=(0, 0), hook="validation end", by=KILL, stage="predict"),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_of_several_functions(name: str, tmp_path: Path) -> None:
    """A script resumes in the function that was cut, and the others are restored, also if it catches a failure."""
    script, rows, cuts = SCRIPTS[name]
    evaluates(group_of(*rows), script, cuts, tmp_path)


class Sets(Judge):
    """Sets what no checkpoint carries at the start of an evaluation, and uses it."""

    def on_validation_start(self) -> None:
        super().on_validation_start()
        os.environ["SCALE"] = "3"
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(True)
        if not self.layers[0]._forward_hooks:
            self.layers[0].register_forward_hook(lambda module, args, output: output + 1)

    def on_test_start(self) -> None:
        self.on_validation_start()
        self.count, self.file = SumMetric(), open(os.devnull)  # noqa: SIM115 - until the end of the process

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * float(os.environ.get("SCALE", "1")) + torch.get_default_dtype().itemsize


class Seeds(Callback):
    """Seeds each start: nothing else makes one that starts over the same."""

    def setup(self, *_: Any, **__: Any) -> None:
        seed_everything(5, verbose=False)


REPEATED = [
    *((stage, Row(name="sets", module=Sets, trainer={"inference_mode": False})) for stage in ("test", "fit")),
    ("fit", Row(
        name="ahead in the next loader", module=Judge,
        validation=lambda: [rows_of(16, shuffle=False)(), DataLoader(Stream(8), batch_size=4)],
    )),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "row"), REPEATED, ids=lambda each: getattr(each, "name", each))
def test_repeated(stage: str, row: Row, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Where a new process would lack what a run has done, the run is repeated from its start, and says so."""
    group = group_of(*([] if row.validation else [CASES["one"][1], Row(name="five", validation=rows_of(20))]), row)
    group = Group(rows=(*group.rows, Row(name="seeds", callbacks=Seeds)))
    evaluates(group, stage, [inside(2)], tmp_path, repeats=3)
    assert told(tmp_path / "cut", 0, "The next start|is saved") == snapshot


def told(root: Path, number: int, pattern: str) -> str:
    """Return the lines with a pattern that a start has printed."""
    text = plain((root / f"start-{number}-rank-0.txt").read_text(), DIR=root)
    return "\n".join(line.split(" To continue, type:")[0] for line in text.splitlines() if re.search(pattern, line))


class Shifted(Judge):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].bias.data[0] = 2.0


PLAIN = Row(name="plain", module=Judge, validation=rows_of(20, shuffle=False))
ANOTHER = {
    "weights": replace(PLAIN, module=Shifted),
    "batch size": replace(PLAIN, validation=lambda: DataLoader(NoisyDataset(20), batch_size=2)),
}


@pytest.mark.parametrize(("name", "is_finished"), [("weights", False), ("batch size", True)])
def test_another_evaluation_starts_over(
    name: str, is_finished: bool, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """An evaluation of other weights, of other data, or with other arguments, is another one, and runs as it is."""
    cut = Cut(at=(0, 0), hook="validation end", by=KILL) if is_finished else inside(2)
    seeded = {"before": lambda: seed_everything(5), "stage": "test"}
    alone = Training(group=group_of(ANOTHER[name]), root=tmp_path / "alone", **seeded).finished()
    training = Training(group=group_of(PLAIN), root=tmp_path / "cut", **seeded)
    training.ended(cut, run_id="run")
    training.group = group_of(ANOTHER[name])
    start = training.ended(run_id="run")
    assert [(0, len(alone.events[0]))] == assert_same(alone.events, start, name="the other test")
    assert told(tmp_path / "cut", 1, "starts over|when it was saved") == snapshot


CONTROLS = {"rng": "result", "metrics": "metric", "results": "judged_epoch", "objects": "listed"}


def test_without_a_part(tmp_path: Path) -> None:
    """A negative control: without a part of the state, an evaluation is another one, and the law says so."""
    group = group_of(replace(PLAIN, validation=rows_of(20)))
    [whole] = Training(group=group, root=tmp_path / "plain", stage="test", with_callback=False).finished().events
    Training(group=group, root=tmp_path / "cut", stage="test").ended(inside(3, by=KILL))
    for part, shows in CONTROLS.items():
        shutil.copytree(tmp_path / "cut", tmp_path / part)
        for path in (tmp_path / part).rglob("autosave-*.ckpt"):
            leave_out_part(path, part)
        start = Training(group=group, root=tmp_path / part, stage="test").ended(strict=False)
        assert shows in different_names(whole, start.events[0]), part


@pytest.mark.parametrize(
    ("stage", "places", "repeats"),
    [
        ("fit", [0, 2, 2, 2], [None, 0, 1, 2]),  # its saves wait for the repeated batches
        ("predict", [0, 2, 2, 4], [None, 0, 1, 0]),
    ],
)
def test_history_of_an_evaluation(stage: str, places: list[int], repeats: list[int | None], tmp_path: Path) -> None:
    """An evaluation is in the history like a fit: its starts and ends, where it continued, and what ran again."""
    training = Training(group=group_of(PLAIN), root=tmp_path, stage=stage)
    for cut, options in ((inside(1), {}), (inside(3, by=KILL), RARELY), (inside(4, by=0), {}), (None, {})):
        training.ended(cut, **options)
    chapter = chapter_of(tmp_path)
    assert [process.reason for process in chapter.processes] == ["stopped by SIGTERM", None, "Struck", "finished"]
    assert {fit.name for fit in chapter.fits} == {f"{stage}-1"}
    assert [fit.place.num_validated or 0 for fit in chapter.fits if fit.place is not None] == places
    report = chapter_report(chapter)
    assert [fit.resumed and fit.resumed.repeats for fit in chapter.fits] == repeats
    assert (report.account.training > 0) == (stage == "fit")
    assert report.account.evaluation > 0
