"""The settings that a branch changes: the new rate at its place in the schedule, and an error where that can't be."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from lightning_faulttolerant.errors import BranchError
from lightning_faulttolerant.trainer.run.changes import ChangedSettings

Make = Callable[[Optimizer], Any]

IN_PROPORTION: dict[str, Make] = {
    "step": lambda o: torchs.StepLR(o, 3),
    "lambda from 0": lambda o: torchs.LambdaLR(o, lambda step: step / 8),
    "linear warm-up": lambda o: torchs.LinearLR(o, 0.1, total_iters=8),
    "cosine": lambda o: torchs.CosineAnnealingLR(o, 20),
    "plateau": lambda o: torchs.ReduceLROnPlateau(o, patience=1),
}
OTHERS: dict[str, Make] = {
    "cosine to a rate": lambda o: torchs.CosineAnnealingLR(o, 20, eta_min=0.001),
    "one cycle": lambda o: torchs.OneCycleLR(o, max_lr=[2 * g["lr"] for g in o.param_groups], total_steps=20),
    "cyclic": lambda o: torchs.CyclicLR(o, 0.001, [2 * g["lr"] for g in o.param_groups], cycle_momentum=False),
    "sequential": lambda o: torchs.SequentialLR(o, [torchs.LinearLR(o, 0.1), torchs.ExponentialLR(o, 0.9)], [4]),
    "chained": lambda o: torchs.ChainedScheduler([torchs.LinearLR(o, 0.1), torchs.StepLR(o, 3)]),
}
ALL = {**IN_PROPORTION, **OTHERS}


class Fit:
    """Two groups, with rates of their own and one other setting, and a scheduler."""

    def __init__(self, make: Make | None, *, rate: float = 0.1, wd: float = 0.05, **defaults: Any) -> None:
        layers = nn.Linear(2, 2), nn.Linear(2, 2)
        groups: list[dict[str, Any]] = [
            {"params": layers[0].parameters(), "lr": rate, "weight_decay": wd},
            {"params": layers[1].parameters(), "lr": rate / 10},
        ]
        self.optimizer = torch.optim.AdamW(groups, **{"lr": 0.003, **defaults})
        self.scheduler: LRScheduler | None = make(self.optimizer) if make is not None else None
        schedulers = [] if self.scheduler is None else [SimpleNamespace(scheduler=self.scheduler)]
        trainer = SimpleNamespace(
            optimizers=[self.optimizer], lr_scheduler_configs=schedulers, accumulate_grad_batches=1
        )
        self.settings = ChangedSettings(trainer)  # type: ignore[arg-type]

    def run(self, steps: int) -> list[list[float]]:
        """Return the rates of each step."""
        rates = []
        for _ in range(steps):
            rates.append([group["lr"] for group in self.optimizer.param_groups])
            self.optimizer.step()
            if isinstance(self.scheduler, torchs.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif self.scheduler is not None:
                self.scheduler.step()
        return rates

    def branch(self, parent: Fit) -> list[str]:
        """Load the state of the parent, apply the changes, and return what they are."""
        self.optimizer.load_state_dict(parent.optimizer.state_dict())
        if self.scheduler is not None and parent.scheduler is not None:
            self.scheduler.load_state_dict(parent.scheduler.state_dict())
        return self.settings.apply(parent.settings.state_dict())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [None, *ALL.values()], ids=["none", *ALL])
def test_an_unchanged_branch_has_the_rates_of_its_parent(make: Make | None) -> None:
    """Warm-ups, cycles, and several groups with rates of their own are no changes."""
    parent, branch = Fit(make), Fit(make)
    parent.run(5)
    assert branch.branch(parent) == []
    assert branch.run(12) == parent.run(12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [None, *IN_PROPORTION.values()], ids=["none", *IN_PROPORTION])
def test_a_changed_rate_counts_at_its_place_in_the_schedule(make: Make | None) -> None:
    """All later rates are those of a run that had the new rate from the start."""
    parent, branch, other = Fit(make), Fit(make, rate=0.2), Fit(make, rate=0.2)
    parent.run(5)
    other.run(5)
    assert branch.branch(parent) == [
        "optimizers.0.groups.0.lr: 0.1 when it was saved, 0.2 now",
        "optimizers.0.groups.1.lr: 0.01 when it was saved, 0.02 now",
    ]
    for now, expected in zip(branch.run(12), other.run(12), strict=True):
        assert now == pytest.approx(expected, rel=1e-12)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_a_changed_rate_is_refused_where_it_could_not_last(make: Make) -> None:
    """The schedule would return to the old rates."""
    parent, branch = Fit(make), Fit(make, rate=0.2)
    parent.run(5)
    with pytest.raises(BranchError, match=r"A branch (can't change it under|can't change it\. Keep|must keep the old)"):
        branch.branch(parent)


def test_a_setting_of_a_group_takes_effect() -> None:
    """Also one that differs from the optimizer's default; that of the other group is a default that changes."""
    parent, branch = Fit(None), Fit(None, wd=0.2, eps=1e-5)
    parent.run(3)
    assert branch.branch(parent) == [
        "optimizers.0.groups.0.weight_decay: 0.05 when it was saved, 0.2 now",
        "optimizers.0.groups.0.eps: 1e-08 when it was saved, 1e-05 now",
        "optimizers.0.groups.1.eps: 1e-08 when it was saved, 1e-05 now",
    ]
    found = [(group["weight_decay"], group["eps"], group["lr"]) for group in branch.optimizer.param_groups]
    assert found == [(0.2, 1e-5, 0.1), (0.01, 1e-5, 0.01)]


def test_what_training_has_set_is_not_overwritten() -> None:
    """A setting that a callback has changed meanwhile, and the script too, has two meanings."""
    parent, branch = Fit(None), Fit(None, wd=0.2)
    parent.optimizer.param_groups[0]["weight_decay"] = 0.07
    with pytest.raises(BranchError, match=r"weight_decay began as 0.05, and is 0.2 now.*to 0.07"):
        branch.branch(parent)


ANOTHER: dict[str, tuple[Make, Make | None]] = {
    "class": (ALL["step"], ALL["cosine"]),
    "none": (ALL["step"], None),
    "one cycle": (ALL["one cycle"], lambda o: torchs.OneCycleLR(o, 0.2, total_steps=20, pct_start=0.5)),
    "chained": (ALL["chained"], lambda o: torchs.ChainedScheduler([torchs.LinearLR(o, 0.1), torchs.StepLR(o, 5)])),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("then", "now"), ANOTHER.values(), ids=ANOTHER)
def test_another_scheduler_is_refused_where_its_state_does_not_fit(then: Make, now: Make | None) -> None:
    """Silence would mean the old schedule, or a mix of two."""
    parent, branch = Fit(then, betas=(0.9, 0.99)), Fit(now, betas=(0.9, 0.99))
    parent.run(5)
    with pytest.raises(BranchError):
        branch.branch(parent)
