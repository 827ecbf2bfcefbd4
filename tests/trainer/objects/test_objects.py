"""The object state of a fit: what is resumed if the script has changed between two starts."""

from __future__ import annotations

import itertools
import select
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance, NotExactError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import RaiseIn
from tests.runs import Net, fit_net, make_trainer


class SavesAt(Callback):
    """Saves a checkpoint after one batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.save_checkpoint(self.path)


def fit(tmp_path: Path, module: LightningModule, callbacks: list[Callback], **arguments: Any) -> None:
    """Train `module` for an epoch of five batches."""
    torch.manual_seed(1)
    loaders = (DataLoader(NoisyDataset(20), batch_size=4), DataLoader(NoisyDataset(4), batch_size=4))
    make_trainer(callbacks, tmp_path, max_epochs=1).fit(module, *loaders, **arguments)


def resume(tmp_path: Path, first: Net, module: Net, *, registered: bool = False) -> tuple[str, ...]:
    """Train `first`, then `module` from its third step, not strictly; return what is lost. Strictly it is refused."""
    path = tmp_path / "saved.ckpt"
    saving = FaultTolerance(tmp_path / "first")
    if registered:
        saving.register("simulator", dict, print)
    fit(tmp_path, first, [saving, SavesAt(path)])
    lax = FaultTolerance(tmp_path / "second", strict=False)
    fit(tmp_path, module, [lax], ckpt_path=path)
    assert lax.resume_report is not None
    if lax.resume_report.objects:
        with pytest.raises(NotExactError, match=lax.resume_report.objects[0].partition(":")[0]):
            fit(tmp_path, module, [FaultTolerance(tmp_path / "strict")], ckpt_path=path)
    return lax.resume_report.objects


class Weighted(Net):
    """Counts its steps, and has constants."""

    def __init__(self, scale: float = 1.0, start: int = 0) -> None:
        super().__init__()
        self.scale = scale
        self.offsets = [1.0, 2.0]
        self.num_steps = start
        self.counts = [0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        if hasattr(self, "counts"):
            self.counts[0] += 1
        loss: Tensor = super().training_step(batch, batch_idx) * self.scale
        return loss


def test_constant_that_the_user_edits_stands(tmp_path: Path) -> None:
    """A value that training has not changed is as in the script; the count continues."""
    module = Weighted(scale=2.0, start=100)
    module.offsets.append(3.0)
    assert resume(tmp_path, Weighted(), module) == ()
    assert (module.scale, module.offsets, module.num_steps, module.counts) == (2.0, [1.0, 2.0, 3.0], 5, [5])


def test_what_is_gone_is_named(tmp_path: Path) -> None:
    """A container that the script no longer creates, or a state that it no longer registers, is not restored."""
    module = Weighted()
    del module.counts
    assert resume(tmp_path, Weighted(), module) == ("module.counts: it no longer exists",)
    gone = "simulator: nothing is registered under this name now"
    assert resume(tmp_path, Net(), Net(), registered=True) == (gone,)


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
    lost = "module.turns: an iterator (itertools.cycle), which can't be copied"
    assert resume(tmp_path, Turns(), Turns()) == (lost,)
    remedy = "FaultTolerance.register('module.turns', state_dict, load_state_dict)"
    assert any(remedy in message for message in caplog.messages)


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


@pytest.mark.parametrize(("module", "name"), [(Deals, "dealer"), (Grows, "grown"), (Opens, "opened")])
def test_what_is_known_at_the_first_boundary_is_an_error_there(
    module: type[Net], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No batch is trained, and nothing is left that the mended script could find; a lax fit trains with one warning."""
    with pytest.raises(NotExactError, match=rf"(?s)This run.*module\.{name}: "):
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


def test_bad_registrations_are_refused() -> None:
    """A name can be registered only once, and the functions must be functions."""
    protected = FaultTolerance().register("seen", dict, print)
    with pytest.raises(ValueError, match="already registered as 'seen'"):
        protected.register("seen", dict, print)
    with pytest.raises(TypeError, match="must be functions"):
        protected.register("other", {}, print)  # type: ignore[arg-type]
