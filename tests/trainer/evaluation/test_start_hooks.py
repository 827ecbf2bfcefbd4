"""Which hooks at the start of a validation run leave nothing but state."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerState

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.evaluation.validation import leaves_only_state


class SetsAttributes(LightningModule):
    """What most modules do."""

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.outputs: list[Any] = []
        self.by_class: Any = defaultdict(list)
        self.count, self.best = 0, float("inf")
        self.metric.reset()
        self.metric.inner.reset()
        self.trainer.seen.clear()
        self.eval()
        self.log("start", 1.0)
        if len(self.outputs) == self.count:
            print("empty")


class Callbacks(Callback):
    """Resets what it has collected."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.collected = []
        self.epoch = trainer.current_epoch


def module_with(hook: Any) -> LightningModule:
    """Return a module with this hook."""
    return type("Made", (LightningModule,), {"on_validation_start": hook})()


def registers(self: Any) -> None:
    """Register a hook."""
    self.handle = self.layer.register_forward_hook(print)


def opens(self: Any) -> None:
    """Open a file."""
    self.file = open("a")  # noqa: SIM115 - never called


def switches(self: Any) -> None:
    """Set a switch of the process."""
    torch.set_default_dtype(torch.float64)


def imports(self: Any) -> None:
    """Use another module."""
    import random

    random.seed(1)


def enters(self: Any) -> None:
    """Enter a context."""
    with contextlib.suppress(ValueError):
        self.count = 0


def closes_over(self: Any) -> None:
    """Keep a function."""
    self.function = lambda: self


def replaces_an_item(self: Any) -> None:
    """Replace a submodule in a container."""
    self.layers[0] = self.other


def trainer_with(*callbacks: Any, module: LightningModule | None = None) -> Any:
    """Return an object with what the check reads."""
    return SimpleNamespace(
        callbacks=list(callbacks),
        lightning_module=module or LightningModule(),
        state=TrainerState(fn=TrainerFn.FITTING),
    )


@pytest.mark.parametrize("module", [LightningModule, SetsAttributes])
def test_hooks_that_only_set(module: type[LightningModule]) -> None:
    """Attributes, resets, and hooks of Lightning's and ours."""
    callbacks = (Callbacks(), ModelCheckpoint(), FaultTolerance(), LambdaCallback())
    assert leaves_only_state(trainer_with(*callbacks, module=module()))


@pytest.mark.parametrize(
    "hook", [registers, opens, switches, imports, enters, closes_over, replaces_an_item, print, SimpleNamespace()]
)
def test_hooks_that_may_do_more(hook: Any) -> None:
    """Anything else may be more than state, also what is no Python function."""
    assert not leaves_only_state(trainer_with(module=module_with(hook)))
    if callable(hook):
        assert not leaves_only_state(trainer_with(LambdaCallback(on_validation_start=hook)))
