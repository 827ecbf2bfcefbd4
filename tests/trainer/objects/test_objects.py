"""The object state of a fit: what is resumed if the script has changed between two starts."""

from __future__ import annotations

import itertools
import select
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance, NotExactError, ResumeReport
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import RaiseIn
from tests.runs import Net, fit_net, make_trainer

PART = "lightning_faulttolerant"


class SavesAt(Callback):
    """Saves a checkpoint after one batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def save(tmp_path: Path, module: LightningModule, protected: FaultTolerance | None = None) -> Path:
    """Train `module`, and return the path of a checkpoint of its third step."""
    path = tmp_path / "saved.ckpt"
    protected = protected or FaultTolerance(tmp_path / "first")
    fit(tmp_path, module, [protected, SavesAt(path)])
    return path


def resume(
    tmp_path: Path, path: Path, module: LightningModule, protected: FaultTolerance | None = None
) -> ResumeReport:
    """Train `module` from a checkpoint, and return the report."""
    protected = protected or FaultTolerance(tmp_path / "second", strict=False)
    fit(tmp_path, module, [protected], ckpt_path=path)
    assert protected.resume_report is not None
    return protected.resume_report


def fit(tmp_path: Path, module: LightningModule, callbacks: list[Callback], **arguments: Any) -> None:
    """Train `module` for an epoch of five batches."""
    torch.manual_seed(1)
    loaders = (DataLoader(NoisyDataset(20), batch_size=4), DataLoader(NoisyDataset(4), batch_size=4))
    make_trainer(callbacks, tmp_path, max_epochs=1).fit(module, *loaders, **arguments)


class Weighted(Net):
    """Counts its steps, and has a constant."""

    def __init__(self, scale: float = 1.0, start: int = 0) -> None:
        super().__init__()
        self.scale = scale
        self.offsets = [1.0, 2.0]
        self.num_steps = start

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        loss: Tensor = super().training_step(batch, batch_idx) * self.scale
        return loss


def test_constant_that_the_user_edits_stands(tmp_path: Path) -> None:
    """A value that training has not changed is as in the script; the count continues."""
    path = save(tmp_path, Weighted())
    module = Weighted(scale=2.0, start=100)
    module.offsets.append(3.0)
    report = resume(tmp_path, path, module)
    assert (module.scale, module.offsets, module.num_steps) == (2.0, [1.0, 2.0, 3.0], 5)
    assert report.objects == ()


class Statistics:
    """Sums up."""

    def __init__(self) -> None:
        self.total = 0.0


class Sums(Statistics):
    """Has another name."""


class Holder(Net):
    """Creates its statistics when it trains, and counts in a list, if it has one."""

    def __init__(self, kind: type[Statistics]) -> None:
        super().__init__()
        self.make = kind
        self.statistics: Any = None
        self.counts = [0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.statistics = self.statistics or self.make()
        self.statistics.total += 1.0
        if hasattr(self, "counts"):
            self.counts[0] += 1
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def test_attribute_that_is_gone_is_named(tmp_path: Path) -> None:
    """A container that the script no longer creates is not restored, and the report says so."""
    path = save(tmp_path, Holder(Statistics))
    module = Holder(Statistics)
    del module.counts
    report = resume(tmp_path, path, module)
    assert report.objects == ("module.counts: it no longer exists",)
    assert module.statistics.total == 5.0


def test_what_only_the_load_finds_is_refused(tmp_path: Path) -> None:
    """State that a strict resume can't restore is an error, also if the save could carry it."""
    path = save(tmp_path, Holder(Statistics))
    module = Holder(Statistics)
    del module.counts
    with pytest.raises(NotExactError, match=r"module\.counts: it no longer exists"):
        fit(tmp_path, module, [FaultTolerance(tmp_path / "second")], ckpt_path=path)


class Turns(Net):
    """Alternates its values with an iterator, which can't be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = itertools.cycle([1.0, 2.0])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx) * next(self.turns)
        return loss


def test_what_cannot_be_carried_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loss is one warning when it is found, and an error at the resume unless the resume is not strict."""
    path = save(tmp_path, Turns())
    line = "module.turns: an iterator (itertools.cycle), which can't be copied"
    warnings = [record.message for record in caplog.records if "module.turns" in record.message]
    assert len(warnings) == 1
    assert "FaultTolerance.register('module.turns', state_dict, load_state_dict)" in warnings[0]
    assert torch.load(path, weights_only=True)[PART]["ranks"][0]["objects"]["lost"] == dict([line.split(": ")])
    with pytest.raises(NotExactError, match=r"module\.turns: an iterator"):
        fit(tmp_path, Turns(), [FaultTolerance(tmp_path / "strict")], ckpt_path=path)
    assert resume(tmp_path, path, Turns()).objects == (line,)


class Deals(Net):
    """Weights its loss by an iterator that its first epoch creates."""

    dealer: Any = None
    num_dealt = 0

    def dealt(self, num_dealt: int) -> Any:
        return itertools.islice(itertools.cycle([1.0, 2.0, 3.0]), num_dealt, None)

    def on_train_epoch_start(self) -> None:
        self.dealer = self.dealer or self.dealt(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_dealt += 1
        loss: Tensor = super().training_step(batch, batch_idx) * next(self.dealer)
        return loss


class Lists(Deals):
    """Puts a function without a name into an object of a library."""

    def on_train_epoch_start(self) -> None:
        self.dealer = self.dealt(0)
        self.counted: Any = Counter(a=lambda: None)  # type: ignore[arg-type]


class Grows(Net):
    """Creates a layer when it trains."""

    def on_train_epoch_start(self) -> None:
        self.grown = nn.Linear(1, 1)


class Opens(Net):
    """Opens a resource of the system in each epoch."""

    def on_train_epoch_start(self) -> None:
        self.opened = select.epoll()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert not self.opened.closed
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "names"),
    [(Deals, ["dealer"]), (Lists, ["counted", "dealer"]), (Grows, ["grown"]), (Opens, ["opened"])],
)
def test_what_is_known_at_the_first_boundary_is_an_error_there(
    module: type[Net], names: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No batch is trained, and nothing is left that the mended script could find; a lax fit trains with one warning."""
    with pytest.raises(NotExactError, match=r"(?s)This run.*" + ".*".join(rf"module\.{name}: " for name in names)):
        fit(tmp_path, module(), [FaultTolerance(tmp_path / "strict"), RaiseIn("on_train_batch_start", 0)])
    assert not list(tmp_path.rglob("*.ckpt"))
    assert "can't carry" not in caplog.text
    fit(tmp_path, module(), [FaultTolerance(tmp_path / "lax", strict=False)])
    [_] = [record for record in caplog.records if "can't carry" in record.message]


class SetsInHook(Deals):
    """Follows the first remedy."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["num_dealt"] = self.num_dealt

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.dealer = self.dealt(checkpoint["num_dealt"])


class Registered(Deals):
    """Follows the second remedy."""

    def load(self, num_dealt: Any) -> None:
        self.dealer = self.dealt(num_dealt)


class OpensOnce(Opens):
    """Follows the remedy for what a skipped hook creates."""

    on_train_start = Opens.on_train_epoch_start
    on_train_epoch_start = Net.on_train_epoch_start


@pytest.mark.parametrize("kind", [SetsInHook, Registered, OpensOnce])
def test_each_remedy_works(kind: type[Net]) -> None:
    """A script that does what the message says resumes exactly."""

    def fits(callbacks: list[Callback], directory: Path) -> Trainer:
        module = kind()
        for one in callbacks:
            if isinstance(module, Registered) and isinstance(one, FaultTolerance):
                one.register("module.dealer", lambda: module.num_dealt, module.load)
        return fit_net(callbacks, directory, module=module, max_epochs=1)

    assert_resumes_exactly(fits, [KillAt(3)], options={"every_n_train_steps": 1})


BATCHES: Any = None


def registered(path: Path, seen: dict[str, Any], **arguments: Any) -> FaultTolerance:
    """Return a callback that has `seen` as a registered state."""
    return FaultTolerance(path, **arguments).register("simulator", lambda: dict(seen), seen.update)


class Sees(Callback):
    """Counts batches in a dict of another object."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self._add = seen.__setitem__
        self._get = seen.get

    def on_train_batch_start(self, *_: Any) -> None:
        self._add("count", self._get("count", 0) + 1)


def test_registered_state(tmp_path: Path) -> None:
    """It continues; without the registration, the report says that the name is not registered."""
    seen: dict[str, Any] = {}
    path = tmp_path / "saved.ckpt"
    fit(tmp_path, Net(), [registered(tmp_path / "first", seen), Sees(seen), SavesAt(path)])
    assert seen["count"] == 5
    again: dict[str, Any] = {}
    protected = registered(tmp_path / "second", again)
    fit(tmp_path, Net(), [protected, Sees(again)], ckpt_path=path)
    assert again["count"] == 5
    assert protected.resume_report is not None
    assert protected.resume_report.is_exact
    gone = "simulator: nothing is registered under this name now"
    assert resume(tmp_path, path, Net()).objects == (gone,)


def test_bad_registrations_are_refused() -> None:
    """A name can be registered only once, and the functions must be functions."""
    protected = FaultTolerance().register("seen", dict, print)
    with pytest.raises(ValueError, match="already registered as 'seen'"):
        protected.register("seen", dict, print)
    with pytest.raises(TypeError, match="must be functions"):
        protected.register("other", {}, print)  # type: ignore[arg-type]
