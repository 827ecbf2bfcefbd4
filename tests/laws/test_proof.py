"""The law of the proof: a restore that is broken on purpose is refused by name, and never called exact."""

from __future__ import annotations

import decimal
import errno
import importlib
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, Subset, get_worker_info

from lightning_faulttolerant.state import process_settings
from lightning_faulttolerant.trainer.save.run_state import PARTS
from tests.damage import cut_file
from tests.laws.cuts import Cut
from tests.laws.events import Event
from tests.laws.ranks import rank_here
from tests.laws.rows import Group, Net, Row, all_rows, rows_of
from tests.laws.runs import Training, whole_run

CUT = Cut(at=(1, 1), by=signal.SIGTERM)
Break = Callable[[], object]


class TwoSchedulers(Net):
    """Has a scheduler that looks at the loss, too, and changes a setting of the process."""

    def on_train_epoch_end(self) -> None:
        decimal.getcontext().prec = 5

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        plateau = ReduceLROnPlateau(found["optimizer"], patience=0)
        return [found["optimizer"]], [found["lr_scheduler"], {"scheduler": plateau, "monitor": "loss"}]


STOPS = Row(name="stops", module=TwoSchedulers, callbacks=lambda: EarlyStopping("loss", patience=9))
PARTLY = ("Logging", "LoggedMetrics", "Buffers", "Freezes", "Records", "Holding", "HoldsMetric", "accumulation")
GROUP = Group(rows=(STOPS, *(all_rows()[name] for name in PARTLY)))
"""Needs each part of the state."""


def lost(owner: Any, name: str) -> Break:
    """Return what makes a method of a library's do nothing."""
    return lambda: setattr(owner, name, lambda *_, **__: None)


def after(owner: Any, name: str, change: Callable[..., object]) -> Break:
    """Return what lets `change` come after a method, with the method's arguments."""

    def break_it() -> None:
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            returned = original(*args, **kwargs)
            change(*args)
            return returned

        setattr(owner, name, changed)

    return break_it


def zero_first(module: nn.Module, *_: Any) -> None:
    """Zero the first weight."""
    next(module.parameters()).data.zero_()


def of_optimizer(change: Callable[[torch.optim.Optimizer, dict[str, Tensor]], object]) -> Break:
    """Return what lets `change` come after each load of an optimizer, with the states of its first parameter."""
    return after(torch.optim.Optimizer, "load_state_dict", lambda one, _: change(one, next(iter(one.state.values()))))


BREAKS: dict[str, tuple[Break, str]] = {
    "a weight": (after(LightningModule, "load_state_dict", zero_first), r"weights.layers.0.weight: .*, a float32 "),
    "optimizer": (lost(torch.optim.Optimizer, "load_state_dict"), r"optimizers.0.state.0.exp_avg: .*, nothing now"),
    "a state of an optimizer": (of_optimizer(lambda _, own: own["exp_avg"].zero_()), r"optimizers.0.state.0.exp_avg: "),
    "an order": (of_optimizer(lambda _, own: own["exp_avg"].copy_(own["exp_avg"].roll(4, 0))), r"exp_avg: .* another "),
    "a rate": (of_optimizer(lambda one, _: one.param_groups[0].update(lr=0.1)), r"lr: 0.0\d+ when it was .*, 0.1 now"),
    "scheduler": (lost(LRScheduler, "load_state_dict"), r"schedulers.0.last_epoch: \d when it was saved, 0 now"),
    "plateau": (lost(ReduceLROnPlateau, "load_state_dict"), r"schedulers.1.best: [\d.]+ when it was saved, inf now"),
    "callback": (lost(EarlyStopping, "load_state_dict"), r"callbacks.EarlyStopping.*.best_score: "),
    "loops": (lost(_FitLoop, "load_state_dict"), r"loops.epoch_loop.batch_progress.*: \d+ when"),
}
for part in [one for one in PARTS if one.read and one.load and one.is_read_back and one.name != "weights"]:
    unread = lambda part=part: object.__setattr__(part, "load", lambda *_: [])  # noqa: E731
    BREAKS[f"part {part.name}"] = (unread, rf"(  - |NOT EXACT ){part.name}\.")
# They are also restored before workers begin.
SETTERS: Any = process_settings._SETTINGS
no_setters = lambda: SETTERS.update({name: (read, lambda _: None) for name, (read, _) in SETTERS.items()})  # noqa: E731
BREAKS["part settings"] = no_setters, BREAKS["part settings"][1]


@pytest.mark.parametrize("name", BREAKS)
def test_broken_restore_is_refused(name: str, tmp_path: Path) -> None:
    """The start that resumes names the first value that is not as it was saved; not strict, its report does."""
    break_it, expected = BREAKS[name]
    training = Training(group=GROUP, root=tmp_path)
    assert training.start(CUT, run_id="run").codes == [CUT.exit_code]
    training.before = break_it
    refused = training.start(run_id="run")
    assert refused.codes == [1], refused.output
    assert re.search(expected, refused.output), refused.output
    accepted = training.start(run_id="run", strict=False).output
    assert "Resumed NOT EXACTLY" in accepted, accepted
    assert re.search(expected, accepted), accepted


# Data, code, and arithmetic that are others than before a kill.

PLACES: set[str] = set()
"""What is another one in this process."""


def see(*places: str) -> Break:
    """Return what makes these others."""
    return lambda: PLACES.update(places)


def lost_in_workers() -> None:
    """Let workers not restore Python's generator."""
    original = random.setstate
    random.setstate = lambda state: None if get_worker_info() else original(state)


class Outside(Dataset[Tensor]):
    """Samples that depend on something outside of the run: a file, or the clock."""

    def __len__(self) -> int:
        return 28 if "length" in PLACES else 24

    def __getitem__(self, index: int) -> Tensor:
        path, row = Path(f"{index}.txt"), float(index ^ 16 if "rows" in PLACES else index)
        row += int.from_bytes(os.urandom(2), "big") if "clock" in PLACES else 0
        return torch.full((4,), float(path.read_text()) if path.exists() else row)


class Stream(IterableDataset[Tensor]):
    """Samples in order."""

    def __iter__(self) -> Iterator[Tensor]:
        length = 28 if "long" in PLACES else 20 if "short" in PLACES else 24
        return (torch.full((4,), float(index)) for index in range(length))


class Order(Sampler[int]):
    """An order that depends on something outside of the run, from the ninth or the seventeenth index on."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        first = 8 if "seed" in PLACES else 16 if "order" in PLACES else 24
        return iter([*range(first), *reversed(range(first, 24))])


def collated(batch: list[Tensor]) -> Tensor:
    """Return the rows in their order, or not."""
    return torch.stack(batch[::-1] if "collate" in PLACES else batch)


def shuffled(**arguments: Any) -> Callable[[], DataLoader[Any]]:
    """Return what makes a loader."""
    return lambda: DataLoader(
        Outside(), 4, **{"sampler": Order(), "drop_last": "drop" in PLACES, "collate_fn": collated, **arguments}
    )


class Edited(Net):
    """Has a loss and gradients that depend on something outside of the run, and says what time it is.

    Its first weights are the same in each process: an evaluation with other weights would be another one.
    """

    def __init__(self) -> None:
        super().__init__()
        for one in self.parameters():
            nn.init.constant_(one, 0.1)
        self.to(torch.bfloat16 if "dtype" in PLACES else None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seconds", time.monotonic())
        seconds = torch.tensor(time.time(), dtype=torch.float64)
        return {"loss": super().training_step(batch, batch_idx), "seconds": seconds}

    def loss(self, batch: Tensor) -> Tensor:
        noise = 1e-6 * os.urandom(1)[0] if "noise" in PLACES else 0.0
        factor = float(os.environ.get("SCALE", "1")) * (2.0 if "loss" in PLACES else 1.0)
        return super().loss(batch) * factor + noise

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    test_step = predict_step = validation_step

    def on_after_backward(self) -> None:
        for one in self.parameters() if "gradients" in PLACES else ():
            one.grad += 1e-3 * os.urandom(1)[0]

    def on_train_start(self) -> None:
        self.layers[2].p = 0.9 if "dropout" in PLACES else 0.3

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if "draws" in PLACES:
            torch.rand(1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        factor = 2.0 if "schedule" in PLACES else 1.0
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor * (step + 1))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Manual(Edited):
    """Returns nothing from its step."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


SHUFFLED = Row(
    name="outside", module=Edited, train=shuffled(), validation=lambda: DataLoader(Outside(), 3, sampler=Order())
)
WORKERS = Row(name="workers", train=lambda: shuffled(num_workers=1 if "workers" in PLACES else 2)())
NOISY = Row(name="noisy", train=rows_of(24, num_workers=2))
MANUAL = Row(name="manual", module=Manual)
SPLIT = Row(name="split", train=lambda: DataLoader(Subset(Outside(), torch.randperm(24)[:20].tolist()), 4))
SCALER = {"plugins": MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=16.0, growth_interval=2))}
SCALED = Row(name="scaled", trainer=SCALER)
STREAM = Row(name="stream", train=lambda: DataLoader(Stream(), 4))
JUDGED = Row(name="judged", module=Edited, validation=lambda: DataLoader(Stream(), 4))
KILLED = Cut(at=(1, 1), every=4)


STOPPED, CAUGHT = (Cut(at=(0, 0), hook="validation", inside=(0, batch), by=signal.SIGTERM) for batch in (1, 6))
AT_END = replace(CAUGHT, hook="validation end")
RARELY = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}
EVALUATION = (RARELY, [STOPPED, replace(CAUGHT, by=signal.SIGKILL)], CAUGHT)
KILLS: dict[str, tuple[dict[str, Any], list[Cut], Cut]] = {
    "fit": ({}, [KILLED], Cut(at=(1, 3), by=signal.SIGTERM)),
    **dict.fromkeys(("fit in validation", "validate", "predict"), EVALUATION),
    "test": (RARELY, [STOPPED, replace(AT_END, by=signal.SIGKILL)], AT_END),
}
"""The options, how the processes end of which the last one was killed, and how the one ends that repeats."""


def killed(root: Path, row: Row = SHUFFLED, name: str = "fit") -> Training:
    """Return a training that was killed some batches after an autosave."""
    options, cuts, _ = KILLS[name]
    training = Training(group=Group(rows=(replace(row, options=options),)), root=root, stage=name.partition(" ")[0])
    for cut in cuts:
        assert training.start(cut, run_id="run").codes == [cut.exit_code], training.starts[-1].output
    return training


@pytest.mark.parametrize("name", KILLS)
def test_repeated_batches_are_compared(name: str, tmp_path: Path) -> None:
    """The start after a kill says how many batches it repeats, and that they were identical; the next one has none."""
    training = killed(tmp_path, name=name)
    num, process = {"fit": (11, 1), "test": (6, 2)}.get(name, (4, 2))  # 11 with a validation run
    stopped = training.start(KILLS[name][2], run_id="run")
    assert re.search(rf"\.ckpt \(\d+ s old\): .*; proving on {num} batches", stopped.output), stopped.output
    identical = f"{num} repeated batches were identical to those of process {process}"
    logged = re.search(rf"{identical}(\. Logged values differ \d+ times?, as those of a clock do)?\n", stopped.output)
    assert logged, stopped.output
    assert bool(logged[1]) == (name == "fit")  # it logs what time it is
    assert "; no batch to compare" in training.start(run_id="run").output


@pytest.mark.parametrize(
    ("name", "place", "kind", "where"),
    [
        ("fit", "order", "order", "batch 4 of epoch 0"),
        ("fit", "rows", "content", "batch 4 of epoch 0"),
        ("fit", "loss", "output", "batch 4 of epoch 0"),
        ("fit in validation", "loss", "output", "batch 2 of the validation run after batch 6 of epoch 0"),
        ("validate", "loss", "output", "batch 2 of validate"),
        ("test", "order", "order", "batch 5 of test"),
        ("predict", "rows", "content", "batch 2 of predict"),
    ],
)
def test_other_batch_stops_the_run(name: str, place: str, kind: str, where: str, tmp_path: Path) -> None:
    """A batch or a result that is another one than before the kill ends the run with 77, until that is accepted."""
    training = killed(tmp_path, name=name)
    training.before = see(place)
    process = len(training.starts)
    for _ in range(2):  # it has saved nothing, and compares again
        stopped = training.start(run_id="run")
        assert stopped.codes == [77], stopped.output
        assert re.search(rf"repeated\.{kind}: {where} .* than in process {process}: \w+ then, \w+ now", stopped.output)
        assert f"--accept repeated.{kind} -- " in stopped.output
    assert '"by": "a batch that is not repeated"' in next(tmp_path.rglob("history.jsonl")).read_text()
    training.before = lambda: (see(place)(), os.environ.update(PL_FAULT_TOLERANT_ACCEPT="repeated"))
    accepted = training.start(KILLS[name][2], run_id="run")
    assert "NOT EXACT since the resume: repeated" in accepted.output, accepted.output
    assert re.search(r"NOT EXACT since it resumed before batch . of .*: repeated", training.start(run_id="run").output)


OTHERS: dict[str, tuple[Row, Break, str]] = {
    "augmented by the clock": (SHUFFLED, see("clock"), "repeated.content"),
    "augmented by the clock in workers": (
        WORKERS,
        see("clock"),
        "workers confirm with their first batch; .*(.*\n)*.*repeated.content",
    ),
    "file of the data or of a cache": (SHUFFLED, lambda: Path("17.txt").write_text("0.5"), "repeated.content"),
    "collate_fn": (SHUFFLED, see("collate"), "repeated.content"),
    "variable of the environment": (SHUFFLED, lambda: os.environ.update(SCALE="1.5"), "repeated.output"),
    "noise in a kernel": (SHUFFLED, see("noise"), "repeated.output"),
    "noise in gradients": (SHUFFLED, see("gradients"), "repeated.output: batch 5"),
    "setting of a layer": (SHUFFLED, see("dropout"), "repeated.output"),
    "draw": (SHUFFLED, see("draws"), "repeated.output"),
    "function of a scheduler": (SHUFFLED, see("schedule"), "repeated.output"),
    "loss of a manual step": (MANUAL, lambda: os.environ.update(SCALE="1.5"), "repeated.output"),
    "noise in a manual step": (MANUAL, see("gradients"), "repeated.output"),
    "more samples in a stream": (
        STREAM,
        see("long"),
        "repeated.place: batch 6 of epoch 0 .*: batch 0 of the validation run after batch 6 of epoch 0 then",
    ),
    "fewer batches of an evaluation": (
        JUDGED,
        see("short"),
        r"repeated.place: batch 0 of epoch 1 .*: batch 5 of the validation run after batch 6 of epoch 0 then",
    ),
    "more batches of an evaluation": (
        JUDGED,
        see("long"),
        r"repeated.place: batch 6 of the validation run after batch 6 of epoch 0 .*: batch 0 of epoch 1 then",
    ),
    "order of a sampler": (SHUFFLED, see("seed"), "yields other indices than before batch 4"),
    "more rows": (Row(name="rows", train=shuffled()), see("length"), r"dataset.length: 24 when it was saved, 28 now"),
    "drop_last": (SHUFFLED, see("drop"), "drop_last: False when it was saved, True now"),
    "split without a seed": (SPLIT, see(), r"dataset.indices: '\[20\] crc .{8}' when (.*\n)*.*Call seed_everything"),
    "scaler": (SCALED, lost(GradScaler, "load_state_dict"), "precision.scale: 64.0 when it was saved, 16.0 now"),
    "generator of a worker": (NOISY, lost_in_workers, "read again after the restore, python differs"),
    "fewer workers": (WORKERS, see("workers"), "num_workers: 2 when it was saved, 1 now"),
    "type of weights": (SHUFFLED, see("dtype"), "a float32 tensor of shape .*, a bfloat16 tensor of shape .* now"),
}
"""What is another one after a kill, and what the refusal says."""


@pytest.mark.parametrize("name", OTHERS)
def test_other_run_is_refused(name: str, tmp_path: Path) -> None:
    """Data, code, or arithmetic that is not as before the kill ends the start, by name, before it saves anything."""
    row, change, expected = OTHERS[name]
    training = killed(tmp_path, row)
    before = sorted(tmp_path.rglob("autosave-*"))
    training.before = change
    start = training.start(run_id="run")
    assert start.codes == [77 if "repeated." in expected else 1], start.output
    assert re.search(expected, start.output), start.output
    assert sorted(tmp_path.rglob("autosave-*")) == before


class Averages(Callback):
    """Keeps an average of a weight."""

    def __init__(self) -> None:
        self.average = torch.zeros(8, 4)

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.average = 0.9 * self.average + 0.1 * module.layers[0].weight.detach()
        module.log("average", self.average.sum())

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "seconds": time.monotonic(), "process": str(os.getpid())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "callback" not in PLACES:
            self.average = state_dict["average"]


def round_off(checkpoint: dict[str, Any]) -> None:
    """Round the states of optimizers, callbacks, and schedulers in a checkpoint."""
    for state in checkpoint["optimizer_states"][0]["state"].values():
        state.update({name: one.bfloat16().float() for name, one in state.items()})
    for state in checkpoint["callbacks"].values():
        state.update({name: one.bfloat16().float() for name, one in state.items() if isinstance(one, Tensor)})
    checkpoint["lr_schedulers"][0]["last_epoch"] = 0


class Rounds(Edited):
    """Has hooks that change what is saved or loaded, and parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def setup(self, stage: str) -> None:
        self.scale.fill_(7.0 if "setup" in PLACES else 1.0)

    def loss(self, batch: Tensor) -> Tensor:
        self.scale += 0.1
        return super().loss(self.scale * batch + self.twins[0](batch).tanh() - 2 * self.twins[1](batch).tanh())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        round_off(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "load" in PLACES:
            round_off(checkpoint)

    def on_train_start(self) -> None:
        if "start" in PLACES:
            zero_first(self)
            self.optimizers().param_groups[0]["lr"] = 0.5

    def configure_optimizers(self) -> Any:
        first, second = [*self.twins[0].parameters()], [*self.twins[1].parameters()]
        twins = [second, first] if "parameters" in PLACES else [first, second]
        optimizer = torch.optim.Adam(
            [{"params": [*self.layers.parameters(), *twins[0]]}, {"params": twins[1]}], lr=0.01
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


ROUNDS = Row(name="rounds", module=Rounds, callbacks=Averages)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Event:
    """The end of an uninterrupted run of `ROUNDS`."""
    return whole_run(Group(rows=(ROUNDS,)), tmp_path_factory.mktemp("whole"))[0][-1]


@pytest.mark.parametrize("place", ["", "callback", "load", "start", "setup", "parameters"])
def test_change_that_does_not_reach_the_run_is_no_alarm(place: str, whole: Event, tmp_path: Path) -> None:
    """What the run's own state wins over, and what the clock says in logs and in a result, changes nothing."""
    training = killed(tmp_path, ROUNDS)
    training.before = see(place)
    start = training.start(run_id="run")
    assert start.codes == [0], start.output
    assert "5 repeated batches were identical to those of process 1" in start.output
    assert start.events[0][-1] == whole


def without(base: type, key: str) -> type:
    """Return a class whose states lack one of their values, or all states of parameters."""

    def state_dict(self: Any) -> dict[str, Any]:
        state = {name: one for name, one in base.state_dict(self).items() if name != key}
        return {**state, "state": {}} if key == "state" else state

    return type(base.__name__, (base,), {"state_dict": state_dict})


class Plateaus:
    """Lowers the rate, and saves a part of what it counts."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num, self.rates = optimizer, 0, [0.01]

    def step(self, *_: Any) -> None:
        self.num += 1
        self.rates.append(self.rates[-1] * 0.9)
        self.optimizer.param_groups[0]["lr"] = sum(self.rates) / self.num

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num = state_dict["num"]


class LeavesOut(Net):
    """Has an optimizer and a scheduler whose states are not whole."""

    optimizer: Any = torch.optim.Adam
    scheduler: Any = staticmethod(partial(StepLR, step_size=1, gamma=0.9))

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters(), 0.01)
        return [optimizer], [{"scheduler": self.scheduler(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class Projects(torch.optim.Adam):
    """Has an object with a tensor in its states."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for one in self.param_groups[0]["params"]:
            projector = self.state[one].setdefault("projector", SimpleNamespace(scale=torch.ones(())))
            one.data.mul_(1 - 0.01 * projector.scale.mul_(0.9))
        return loss


class Helper:
    """Counts, and saves only a part of that."""

    def __init__(self) -> None:
        self.num, self.sums = 0, [0]

    def factor(self) -> float:
        self.num += 1
        self.sums.append(self.sums[-1] + self.num)
        return 1.0 + 0.001 * self.sums[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num = state_dict["num"]


class Draws(Helper):
    """Has a generator, which can't be carried, and whose place it restores by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = self.factors()

    def factors(self) -> Iterator[float]:
        while True:
            self.num += 1
            yield 1.0 + 0.01 * self.num

    def factor(self) -> float:
        return next(self.rest)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num, self.rest = state_dict["num"], self.factors()


class AtStart(Net):
    """Has hooks at its start that set numbers, from weights, from a draw, and from a batch, and the time."""

    norm: float | None = None
    factors: Mapping[str, float] = MappingProxyType({})
    """None in the sanity check."""

    def __init__(self) -> None:
        super().__init__()
        self.constants = {"edited": 0.25 if "edited" in PLACES else 0.5}

    def on_train_end(self) -> None:
        assert self.constants == {"edited": 0.25 if "edited" in PLACES else 0.5}

    def on_fit_start(self) -> None:
        if self.norm is None:
            self.norm = self.layers[0].weight.detach().norm().item()
            self.anchor = self.layers[0].bias.detach().numpy().copy()

    def on_train_start(self) -> None:
        self.began = time.monotonic()
        self.factors = {"draw": float(torch.rand(())), "batch": float(next(iter(rows_of(24)())).mean())}
        self.rates = [group["lr"] for group in self.trainer.optimizers[0].param_groups]

    def loss(self, batch: Tensor) -> Tensor:
        weight, bias = self.layers[0].weight, self.layers[0].bias
        anchored = (weight.norm() - self.norm).square() + (bias - torch.from_numpy(self.anchor)).square().sum()
        return super().loss(batch) * sum(self.factors.values()) + anchored

    def on_train_batch_end(self, *_: Any) -> None:
        assert time.monotonic() - self.began < 60.0
        self.trainer.optimizers[0].param_groups[0]["lr"] = self.rates[0] * 0.9**self.trainer.global_step

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


def test_numbers_of_start_hooks_are_those_of_the_first_process(tmp_path: Path) -> None:
    """What a start hook sets from weights, a draw, or a batch is the run's; a time and an edit are of this process."""
    group = Group(rows=(Row(name="at start", module=AtStart),))
    whole = whole_run(group, tmp_path / "whole")[0][-1]
    training = Training(group=group, root=tmp_path / "stopped")
    training.start(CUT)
    training.more = lambda: [MovesClock()]
    assert training.start().events[0][-1] == whole, training.starts[-1].output
    training = Training(group=group, root=tmp_path / "edited")
    training.start(CUT)
    training.before = see("edited")
    assert training.start().codes == [0], training.starts[-1].output


class MovesClock(Callback):
    """Lets the clock of the machine begin again."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        began = time.monotonic()
        original = time.monotonic
        time.monotonic = lambda: original() - began - 1_000.0


class Helped(LeavesOut):
    """Has an object of its own with a state."""

    made: Any = Helper

    def __init__(self) -> None:
        super().__init__()
        self.helper = self.made()

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) * self.helper.factor()


COVERED: dict[str, dict[str, Any]] = {
    "an object in the states of an optimizer": {"optimizer": Projects},
    "a list of a helper": {},
    "a generator of a helper": {"made": Draws},
    "states of an optimizer": {"optimizer": without(torch.optim.Adam, "state")},
    "a value of a scheduler": {
        "scheduler": staticmethod(partial(without(StepLR, "last_epoch"), step_size=3, gamma=0.9))
    },
    "a list of a scheduler": {"scheduler": Plateaus},
}


@pytest.mark.parametrize("name", COVERED)
def test_what_a_state_dict_leaves_out_is_carried(name: str, tmp_path: Path) -> None:
    """A run that is stopped, so that no batch shows a difference, continues with all values of its optimizers."""
    group = Group(rows=(Row(name=name, module=type("Own", (Helped,), COVERED[name])),))
    whole = whole_run(group, tmp_path / "whole")[0][-1]
    training = Training(group=group, root=tmp_path / "stopped")
    training.start(CUT)
    assert training.start().events[0][-1] == whole, training.starts[-1].output


class Writer(TorchCheckpointIO):
    """Rounds the weights in the files that it writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *arguments: Any, **options: Any) -> None:
        rounded = {name: one.half().to(one.dtype) for name, one in checkpoint["state_dict"].items()}
        super().save_checkpoint({**checkpoint, "state_dict": rounded}, *arguments, **options)


def test_file_that_its_writer_has_changed_is_refused(tmp_path: Path) -> None:
    """A checkpoint of the user's in which a CheckpointIO has rounded weights is no exact one; autosaves are."""
    saves = Row(
        name="writes", callbacks=lambda: [ModelCheckpoint("files", every_n_train_steps=2, save_top_k=-1)],
        trainer={"plugins": [Writer()], "enable_checkpointing": True},
    )  # fmt: skip
    training = killed(tmp_path, saves)
    assert training.start(run_id="run").codes == [0]
    training.ckpt_path = max(tmp_path.rglob("files/*.ckpt"))
    refused = training.start(run_id="run", auto_resume=False)
    assert refused.codes == [1], refused.output
    assert "can't be resumed exactly: weights: " in refused.output


# What happens to a run.


def records() -> list[Path]:
    """Return the files of all records on this machine."""
    return list(Path(tempfile.gettempdir()).glob("lightning_faulttolerant-*/*.record"))


def test_old_record_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record of a run that was not continued for a month is removed by the next run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed(tmp_path / "old")
    [old] = records()
    os.utime(old, (0, time.time() - 3_000_000))
    killed(tmp_path / "new")
    assert old not in records()
    assert len(records()) == 1


def no_space(*_: Any) -> None:
    """Do what the system does if a disk is full."""
    raise OSError(errno.ENOSPC, "no space")


def live_again(training: Training) -> None:
    """Start over with another loss, with the record of the earlier life on this machine."""
    stale = {one: one.read_bytes() for one in records()}
    training.before = see("loss")
    assert training.start(KILLED, run_id="run", auto_resume=False).codes == [KILLED.exit_code]
    for path, content in stale.items():
        path.write_bytes(content)


def later(break_it: Break) -> Callable[[Training], object]:
    """Return what breaks something in the next process."""
    return lambda training: setattr(training, "before", break_it)


IDENTICAL = "{} repeated batches were identical to those of process 1"
EVENTS: dict[str, tuple[Callable[[Training], object], str]] = {
    "a kill in the middle of the repetition": (
        lambda training: training.start(Cut(at=(0, 5), every=4), run_id="run"), IDENTICAL.format(11)
    ),
    "a damaged autosave": (
        lambda training: cut_file(max(training.root.rglob("autosave-*.ckpt"))), IDENTICAL.format(15)
    ),
    "another machine": (lambda training: [one.unlink() for one in records()], "; no batch to compare"),
    "a full disk": (later(lambda: setattr(os, "posix_fallocate", no_space)), "Batches are not noted, .* no space"),
    "an earlier life of the run": (live_again, "; no batch to compare"),
    "more threads": (
        later(lambda: (torch.set_num_threads(torch.get_num_threads() + 1), see("loss")())),
        "repeated.output: batch 4 .* The arithmetic of this run may differ: threads: ",
    ),
}  # fmt: skip
"""What happens to a run after a kill, and what the next start says."""


@pytest.mark.parametrize("name", EVENTS)
def test_run_continues_after(name: str, tmp_path: Path) -> None:
    """The next start repeats what there is to repeat, or says that it can't compare it, and finishes."""
    happens, expected = EVENTS[name]
    training = killed(tmp_path)
    happens(training)
    start = training.start(run_id="run")
    assert start.codes == [0], start.output
    assert re.search(expected, start.output), start.output


def test_edit_is_named(tmp_path: Path) -> None:
    """A start that continues after an edit names the file, whether or not it repeats batches."""
    module = tmp_path / "edited.py"
    module.write_text("FACTOR = 1.0")

    def load() -> None:
        sys.path.insert(0, str(tmp_path))
        os.environ["SCALE"] = str(importlib.import_module("edited").FACTOR)

    training = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path, before=load)
    training.start(KILLED, run_id="run")
    module.write_text("FACTOR = 1.25")
    refused = training.start(run_id="run")
    assert refused.codes == [77], refused.output
    assert len(re.findall(rf"these files have changed since: {module}\b", refused.output)) == 2
    module.write_text("FACTOR = 1.0")
    training.start(Cut(at=(1, 3), by=signal.SIGTERM), run_id="run")
    module.write_text("FACTOR = 1.5")
    stopped = training.start(run_id="run").output
    assert "; no batch to compare" in stopped
    assert f"these files have changed since: {module}" in stopped


class Fails(Callback):
    """Raises after the second batch, which has another loss."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        os.environ["SCALE"] = "1.5" if batch_idx else "1"

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            raise ValueError("of the user")


def test_exception_after_a_difference_is_not_hidden(tmp_path: Path) -> None:
    """An exception that comes before the next boundary ends the process, in the middle of an accumulation window."""
    group = Group(rows=(replace(SHUFFLED, trainer={"accumulate_grad_batches": 4}, options={"overhead_budget": 1.0}),))
    training = Training(group=group, root=tmp_path)
    training.start(Cut(at=(1, 3)), run_id="run")
    training.more = lambda: [Fails()]
    start = training.start(run_id="run")
    assert start.codes == [1], start.output
    assert "repeated.output" in start.output
    assert "ValueError: of the user" in start.output


def test_fit_that_ends_earlier_says_so(tmp_path: Path) -> None:
    """A fit that ends before it has repeated all batches says how many are left, and that the others were identical."""
    row = replace(STREAM, trainer={"limit_val_batches": 0})
    training = Training(group=Group(rows=(row,)), root=tmp_path, before=see("long"))
    training.start(Cut(at=(1, 6), hook="step", every=4), run_id="run")
    training.before = None
    start = training.start(run_id="run")
    assert "1 repeated batch was identical to those of process 1" in start.output, start.output
    assert "This is another run: batches that process 1 has run, and this process has not: 1." in start.output


RANKS = Row(name="ranks", warns=("Using `DistributedSampler` with", "It is recommended to use `self.log"))


@pytest.mark.parametrize("names", [("Renames", "PersistentTracker"), ("WrappedByParts", "wrapped_workers", "nested")])
def test_no_false_alarm_on_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    """Renamed buffers that differ by rank, and a loader whose iterator is not there yet, are no alarm."""
    group = Group(rows=(RANKS, *(all_rows()[name] for name in names)))
    training = Training(group=group, root=tmp_path, num_ranks=2)
    training.start(Cut(at=(0, 3)))
    assert training.start().codes == [0, 0], training.starts[-1].output


@pytest.mark.parametrize(
    ("stage", "cut"),
    [
        ("fit", Cut(at=(1, 2), every=2)),
        ("fit", Cut(at=(1, 1), hook="step")),  # an autosave is due at the next boundary
        ("test", replace(CAUGHT, inside=(0, 3), by=signal.SIGKILL)),
    ],
)
def test_ranks_stop_together(stage: str, cut: Cut, tmp_path: Path) -> None:
    """A batch that is another one on one rank stops all of them at a boundary, and nothing is saved before."""
    options = {"every_n_train_steps": cut.every} if stage == "fit" else RARELY
    training = Training(group=Group(rows=(RANKS, SHUFFLED)), root=tmp_path, num_ranks=2, stage=stage)
    training.start(cut, run_id="run", **options)
    training.before = lambda: PLACES.update({"loss"} if rank_here() else ())
    for _ in range(2):  # it has saved nothing, and compares again
        start = training.start(run_id="run", **options)
        assert start.codes == [77, 77], start.output
        assert start.output.count("repeated.output: batch ") == 1, start.output
        assert "This rank stops, because rank 1 does not repeat exactly" in start.output, start.output
    training.before = None
    assert training.start(run_id="run", **options).codes == [0, 0], training.starts[-1].output
