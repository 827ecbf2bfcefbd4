"""The object state of a fit: what is resumed if the script has changed, what is refused, and the remedies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_faulttolerant import FaultTolerance, NotExactError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.laws.rows import Net
from tests.runs import SavesAfter, fit_net


def fit(tmp_path: Path, module: LightningModule, callbacks: list[Callback], **arguments: Any) -> None:
    """Train `module` for an epoch of five batches."""
    torch.manual_seed(1)
    fit_net(callbacks, tmp_path, module=module, max_epochs=1, **arguments)


def resume(tmp_path: Path, first: Net, module: Net, *, registered: bool = False) -> tuple[str, ...]:
    """Train `first`, then `module` from its third step, not strictly; return what is lost. Strictly it is refused."""
    path = tmp_path / "saved.ckpt"
    saving = FaultTolerance(tmp_path / "first")
    if registered:
        saving.register("simulator", dict, print)
    fit(tmp_path, first, [saving, SavesAfter(3, path)])
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
        return super().training_step(batch, batch_idx) * self.scale


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


class Deals(Net):
    """Weights its loss by an iterator that its first epoch creates."""

    dealer: Any = None
    num_dealt = 0

    def deal(self, num_dealt: Any) -> None:
        self.dealer = itertools.islice(itertools.cycle([1.0, 2.0, 3.0]), num_dealt, None)

    def on_train_epoch_start(self) -> None:
        if self.dealer is None:
            self.deal(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_dealt += 1
        return super().training_step(batch, batch_idx) * next(self.dealer)


class Grows(Net):
    def on_train_epoch_start(self) -> None:
        self.grown = nn.Linear(1, 1)


@pytest.mark.parametrize(("module", "name"), [(Deals, "dealer"), (Grows, "grown")])
def test_what_is_known_at_the_first_boundary_is_an_error_there(
    module: type[Net], name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is left that the mended script could find; a fit that is not strict trains with one warning."""
    with pytest.raises(NotExactError, match=rf"(?s)This run.*module\.{name}: "):
        fit(tmp_path, module(), [FaultTolerance(tmp_path / "strict")])
    assert not list(tmp_path.rglob("*.ckpt"))
    assert "can't carry" not in caplog.text
    fit(tmp_path, module(), [FaultTolerance(tmp_path / "lax", strict=False)])
    [_] = [record for record in caplog.records if "can't carry" in record.message]


def test_a_registered_state_resumes_exactly() -> None:
    """A script that does what the message says resumes exactly; `SavesTable` of the laws shows the other remedy."""

    def fits(callbacks: list[Callback], directory: Path) -> Trainer:
        module = Deals()
        for one in callbacks:
            if isinstance(one, FaultTolerance):
                one.register("module.dealer", lambda: module.num_dealt, module.deal)
        return fit_net(callbacks, directory, module=module, max_epochs=1)

    assert_resumes_exactly(fits, [KillAt(3)], options={"every_n_train_steps": 1})


def test_bad_registrations_are_refused() -> None:
    """A name can be registered only once, and the functions must be functions."""
    protected = FaultTolerance().register("seen", dict, print)
    with pytest.raises(ValueError, match="already registered as 'seen'"):
        protected.register("seen", dict, print)
    with pytest.raises(TypeError, match="must be functions"):
        protected.register("other", {}, print)  # type: ignore[arg-type]
