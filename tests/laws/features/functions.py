"""State in functions, classes, globals, and hooks."""

from __future__ import annotations

import functools
import random
import statistics
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Factor, carried, row

RNG = np.random.default_rng(0)
PYTHON_RNG = random.Random(0)
TORCH_RNG = torch.Generator().manual_seed(0)
CONFIG = {"scale": 1.0}
items: list[float] = []
names = 0
"""Names that the package uses in its own code, too."""


class DrawsFromGlobals(NoisyDataset):
    """Draws from generators at the top of this module."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = float(RNG.normal()) + PYTHON_RNG.gauss(0, 1) + float(torch.randn((), generator=TORCH_RNG))
        return super().__getitem__(index) + 0.1 * drawn


@row("train", part="held", shows="content", takes="global generators", apart="counts")
def global_generators() -> DataLoader:
    """A data set draws from generators at the top of a module."""
    return DataLoader(DrawsFromGlobals(24), batch_size=4, shuffle=True)


@row("train", part="loaders", shows="content", takes=("global generators", "epochs told"))
def global_generators_in_workers() -> DataLoader:
    """Workers draw from generators at the top of a module."""
    return DataLoader(DrawsFromGlobals(32), batch_size=4, shuffle=True, num_workers=2)


@row("module", part="held", shows="factor of GlobalGenerators", takes="global generators")
class GlobalGenerators(Factor):
    """Draws in its step from generators at the top of a module, and from those of its class."""

    python_of_class: ClassVar[random.Random] = random.Random(0)
    others_of_class: ClassVar[dict[str, Any]] = {"numpy": np.random.default_rng(0)}

    def factor(self, loss: Tensor) -> float:
        own = self.python_of_class.random() + float(self.others_of_class["numpy"].random())
        drawn = float(RNG.random()) + PYTHON_RNG.random() + float(torch.rand((), generator=TORCH_RNG))
        return (own + drawn) / 2


@carried
class Globals(Factor):
    """Keeps losses, a setting, and a count at the top of a module."""

    def factor(self, loss: Tensor) -> float:
        global names
        names += 1
        items.append(loss.tanh().item())
        CONFIG["scale"] *= 0.95
        return statistics.fmean(items) * CONFIG["scale"] + names / 10


def local_class() -> type:
    """Return a class that no module has under its name."""

    class Local:
        seen: ClassVar[list[float]] = []

        class Inner:
            total = 0

    return Local


@functools.partial(carried, takes="copies")
class Classes(Factor):
    """Counts in an attribute of its class, and in those of a class that no module has under its name."""

    steps_of_class = 0

    def __init__(self) -> None:
        super().__init__()
        self.local = local_class()()

    def factor(self, loss: Tensor) -> float:
        local: Any = type(self.local)
        Classes.steps_of_class += 1
        local.Inner.total += 1
        local.seen.append(loss.tanh().item())
        return self.steps_of_class / 10 + local.Inner.total / 9 + statistics.fmean(local.seen)


def remember(value: float, seen: list[float] = []) -> float:  # noqa: B006 - it is what the row is about
    """Keep its arguments in a default."""
    seen.append(value)
    return sum(seen) / len(seen)


def count() -> int:
    """Count in an attribute of the function."""
    count.calls = getattr(count, "calls", 0) + 1  # type: ignore[attr-defined]  # mypy: a function has no attributes
    return int(count.calls)  # type: ignore[attr-defined]


def counted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Pass a function the number of its calls, which a closure counts."""
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
    return loss.detach().tanh() + num_calls / 10


@functools.partial(carried, takes="copies")
class Functions(Factor):
    """State in a default, in an attribute of a function, in a decorator, and in a closure that a module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.counting = counted(lambda value, num_calls: value + num_calls / 10)

    def factor(self, loss: Tensor) -> Any:
        return remember(loss.tanh().item()) + count() / 10 + scaled(loss) + self.counting(0.1)


class Fades:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, gradient: Tensor) -> Tensor:
        self.num_calls += 1
        return gradient / self.num_calls


@row("module", part="objects", shows="factor of Hooks", takes=("layers", "copies"))
class Hooks(Factor):
    """Collects the means of a layer's outputs in a forward hook, and fades a gradient in the hook of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        means: list[float] = []

        def collect(module: nn.Module, inputs: Any, output: Tensor) -> None:
            means.append(float(output.detach().mean()))

        self.layers[0].register_forward_hook(collect)
        self.mean_of_outputs = lambda: sum(means) / len(means)
        self.fades = Fades()
        self.layers[0].weight.register_hook(self.fades)

    def factor(self, loss: Tensor) -> float:
        return 1 + self.mean_of_outputs() + self.fades.num_calls / 10
