"""The law for state of the user in functions, classes, hooks, and Lightning's own objects."""

from __future__ import annotations

import functools
from collections.abc import Callable
from queue import Queue
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from tqdm import tqdm

from lightning_faulttolerant.testing import KillAt, NotTheSame
from tests.object_states import LATER_EPOCH, Own, assert_carried, each_cut, slowly
from tests.runs import Net

items: list[float] = []
names = 0
"""Names that the package uses in its own code, too."""


def remember(value: float, seen: list[float] = []) -> float:  # noqa: B006 - it is what the test is about
    """Keep its arguments in a default."""
    seen.append(value)
    return sum(seen) / len(seen)


def count() -> int:
    """Count in an attribute of the function."""
    count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]  # mypy: a function has no attributes
    return int(count.calls)  # type: ignore[attr-defined]


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass a function the number of its calls."""
    num_calls = 0

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return function(*arguments, num_calls)

    return call


@counted
def scaled(loss: Tensor, num_calls: int) -> Tensor:
    """Scale by the number of calls."""
    return loss.detach() + num_calls


class UsesGlobals(Own):
    """Its globals have the same names as the package's."""

    def factor(self, loss: Tensor) -> float:
        global names
        names += 1
        items.append(float(names))
        return sum(items)


class UsesDefault(Own):
    def factor(self, loss: Tensor) -> float:
        return 1 + remember(float(loss.detach()))


class UsesFunctionAttribute(Own):
    def factor(self, loss: Tensor) -> float:
        return 1 + count() / 10


class UsesDecorator(Own):
    def factor(self, loss: Tensor) -> Any:
        return scaled(loss)


class Outer:
    """Has its own class, which counts."""

    class Inner:
        """Counts in an attribute of the class."""

        total = 0


class UsesNestedClass(Own):
    def factor(self, loss: Tensor) -> float:
        Outer.Inner.total += 1
        return 1 + Outer.Inner.total / 10


def local_class() -> type:
    """Return a class that no module has under its name."""

    class Local:
        seen: ClassVar[list[float]] = []

    return Local


class UsesLocalClass(Own):
    def __init__(self) -> None:
        super().__init__()
        self.local = local_class()()

    def factor(self, loss: Tensor) -> float:
        type(self.local).seen.append(float(loss.detach()))  # type: ignore[attr-defined]
        return 1 + len(type(self.local).seen) / 10  # type: ignore[attr-defined]


class UsesForwardHook(Own):
    """Collects the means of a layer's outputs in a hook."""

    def __init__(self) -> None:
        super().__init__()
        means: list[float] = []

        def collect(module: nn.Module, inputs: Any, output: Tensor) -> None:
            means.append(float(output.detach().mean()))

        self.layers[0].register_forward_hook(collect)
        self.mean = lambda: sum(means) / len(means)

    def factor(self, loss: Tensor) -> float:
        return 1 + self.mean()


class UsesTensorHook(Own):
    """Scales a weight's gradient down in a hook, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].weight.register_hook(Fades())


class Fades:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.num_calls += 1
        return gradient / self.num_calls


class UsesQueue(Own):
    def __init__(self) -> None:
        super().__init__()
        self.waiting: Queue[float] = Queue()

    def factor(self, loss: Tensor) -> float:
        self.waiting.put(float(loss.detach()))
        return 1 + (self.waiting.get() if self.waiting.qsize() > 2 else 0.0)


class UsesScheduler(Net):
    """Has a scheduler with a function that counts."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        asked: list[int] = []

        def rate(step: int) -> float:
            asked.append(step)
            return 1 / len(asked)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class UsesTrainer(Own):
    """Keeps a number on the Trainer."""

    def factor(self, loss: Tensor) -> float:
        self.trainer.smoothed_loss = getattr(self.trainer, "smoothed_loss", 0.0) / 2 + float(loss.detach())
        return 1 + float(self.trainer.smoothed_loss)


class ShowsProgress(Own):
    """Creates a bar at the start of each epoch, and advances it manually."""

    def on_train_epoch_start(self) -> None:
        self.bar = tqdm(total=5)

    def factor(self, loss: Tensor) -> float:
        self.bar.update(1)
        return 1 + self.bar.n / 10


MODULES = [UsesGlobals, UsesDefault, UsesFunctionAttribute, UsesDecorator, UsesNestedClass, UsesLocalClass,
           UsesForwardHook, UsesTensorHook, UsesQueue, UsesScheduler, UsesTrainer, ShowsProgress]  # fmt: skip


@pytest.mark.parametrize("module", [MODULES[0], *map(slowly, MODULES[1:])])
@each_cut
def test_state_of_functions(fault: Callback, module: type[LightningModule]) -> None:
    """State in functions, classes, and hooks continues."""
    assert_carried(fault, module=module)


class All(Own):
    """Combines those of these that only have a factor."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [kind for kind in MODULES if "factor" in vars(kind) and kind is not ShowsProgress]
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def factor(self, loss: Tensor) -> Any:
        factors = []
        for part in self.parts:
            part.trainer = self.trainer
            if isinstance(part, UsesForwardHook):
                part.layers(torch.ones(2, 4))
            factors.append(torch.as_tensor(part.factor(loss)).double())
        return torch.stack(factors).tanh().sum().float()


@pytest.mark.parametrize("without", [None, "objects"])
def test_all_functions_at_once(without: str | None) -> None:
    """All of them together continue, and without the object state the runs differ."""
    if without is None:
        assert_carried(KillAt(8), module=All)
        return
    with pytest.raises(NotTheSame, match="Left out:"):
        assert_carried(KillAt(8), module=All, without=without)


def averages() -> list[Callback]:
    """Return a Lightning callback with functions that store the number of batches."""
    state = {"batches": 0}

    def weigh(trainer: Trainer, module: LightningModule, *_: Any) -> None:
        state["batches"] += 1
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] = 0.01 * state["batches"]

    return [LambdaCallback(on_train_batch_start=weigh)]


@pytest.mark.parametrize("fault", [LATER_EPOCH])
def test_functions_of_a_lambda_callback(fault: Callback) -> None:
    """State in the functions of a `LambdaCallback` continues."""
    assert_carried(fault, users=averages)


class Grows(Own):
    """Creates a teacher after some training, or first of all."""

    def __init__(self, *, follows_advice: bool) -> None:
        super().__init__()
        if follows_advice:
            self.teacher = nn.Linear(4, 1)

    def factor(self, loss: Tensor) -> Any:
        if self.trainer.global_step == 3 and not hasattr(self, "teacher"):
            self.teacher = nn.Linear(4, 1)
        return 1.0 if self.trainer.global_step < 4 else 1 + self.teacher(torch.ones(4)).sum()


class Swaps(Own):
    """Swaps two layers, or calls them in another order."""

    def __init__(self, *, follows_advice: bool) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.follows_advice = follows_advice
        self.first = 0

    def factor(self, loss: Tensor) -> Any:
        if self.trainer.global_step == 3 and self.follows_advice:
            self.first = 1
        elif self.trainer.global_step == 3:
            self.twins[0], self.twins[1] = self.twins[1], self.twins[0]
        return 1 + self.twins[self.first](torch.ones(4)).sum() + 2 * self.twins[1 - self.first](torch.ones(4)).sum()


class Opens(Own):
    """Opens a file in a hook that a resume in the middle of an epoch does not call."""

    def on_train_epoch_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the epoch

    def on_train_epoch_end(self) -> None:
        self.handle.close()


class OpensAtTheStart(Own):
    """Opens it in a hook that each start calls."""

    def on_train_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the fit

    def factor(self, loss: Tensor) -> float:
        return float(self.handle.readable())

    def on_train_end(self) -> None:
        self.handle.close()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Grows, "module.teacher: a module that training has assigned; create it in __init__"),
        (Swaps, "layers that have changed places: .*let forward choose"),
        (
            lambda follows_advice: (OpensAtTheStart if follows_advice else Opens)(),
            "module.handle: .*a resume in the middle of an epoch .*; create it in on_train_start",
        ),
    ],
    ids=["grows", "swaps", "opens"],
)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_what_no_process_makes_again_is_named(module: Any, reason: str) -> None:
    """What training created, moved, or opened is refused by name, with advice; who follows it continues exactly."""
    with pytest.raises(NotTheSame, match=rf"(?s)can't be resumed exactly.*{reason}"):
        assert_carried(KillAt(8), module=lambda: module(follows_advice=False))
    assert_carried(KillAt(8), KillAt(1), module=lambda: module(follows_advice=True))


class KeepsGraph(Own):
    """Lets the gradient of a batch flow back into the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        before, self.last = self.last, self.layers[0](batch).mean()
        return loss if before is None else loss + before

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_gradient_into_the_batch_before_is_an_error() -> None:
    """A kept tensor has no graph after a resume: going back through it is an error, not a silent loss."""
    with pytest.raises(NotTheSame, match="from before the interruption"):
        assert_carried(KillAt(8), module=KeepsGraph)
