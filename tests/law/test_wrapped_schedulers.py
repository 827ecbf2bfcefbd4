"""The law for schedulers and optimizers that wrap others, and for objects that hold the groups of an optimizer."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim.lr_scheduler import ChainedScheduler, CosineAnnealingLR, ExponentialLR, LRScheduler, SequentialLR

from lightning_faulttolerant import AtomicCheckpointIO, FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt
from tests.rank_runs import RankNet, assert_ranks_resume, rank_fit
from tests.runs import Net, assert_exact, fit_net
from tests.sharded import Fsdp1OnCpu, Fsdp1WholeOnCpu, ShardedNet, fsdp2


class Warmup(LRScheduler):
    """Raises the rate, and then steps another scheduler, with the state_dict of torch."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after = after
        self.groups = optimizer.param_groups
        self.shape = self.factor
        super().__init__(optimizer)

    def factor(self) -> float:
        return self.last_epoch / 3

    def get_lr(self) -> list[Any]:
        return [rate * max(self.shape(), 0.5) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 3:
            super().step()
            return
        self.last_epoch += 1
        self.after.step()
        self.groups[0]["momentum"] *= 0.99
        self._last_lr = self.after.get_last_lr()


@dataclass
class Phase:
    """A part of a schedule, which counts its steps."""

    scheduler: Any
    num_steps: int = 0


class Phases(LRScheduler):
    """Steps those of its schedulers in turn that lists, dicts, tuples, and other objects hold."""

    def __init__(self, optimizer: Any) -> None:
        self.current = None
        lambdas = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.95**step)
        chained = ChainedScheduler([ExponentialLR(optimizer, 0.9), CosineAnnealingLR(optimizer, 20)])
        warm_up = Warmup(optimizer, CosineAnnealingLR(optimizer, 20))
        sequence = SequentialLR(optimizer, [warm_up, ExponentialLR(optimizer, 0.9)], [2])
        self.held = [{"first": (Phase(chained), Phase(sequence))}, {"last": (Phase(lambdas),)}]
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        phases = [phase for one in self.held for phases in one.values() for phase in phases]
        if self.last_epoch:
            self.current = phases[self.last_epoch % 3]
            self.current.scheduler.step()
            self.current.num_steps += 1


class Wraps(torch.optim.Optimizer):
    """Shares the state and the groups of an optimizer, and sets neither in a load."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.inner = inner
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Lookahead(Wraps):
    """Has slow weights in a state of its own; a load sets the state that it holds of the other optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state = defaultdict(dict)
        self.fast_state = inner.state
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.num_steps += 1
        for weight in self.param_groups[0]["params"] if self.num_steps % 3 == 0 else ():
            slow = self.state[weight].setdefault("slow", weight.detach().clone())
            weight.copy_(slow.lerp_(weight, 0.5))
            self.fast_state[weight]["momentum_buffer"].zero_()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fast_state": self.inner.state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.inner.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.fast_state = self.inner.state


class Averager:
    """Counts the calls."""

    step = 0

    def average_parameters(self, params: Any) -> None:
        self.step += 1


def post_local(inner: torch.optim.Optimizer) -> Any:
    """Return torch's optimizer that wraps another one and averages; it accepts a closure, which Lightning passes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own code uses torch.jit.script
        from torch.distributed.optim import PostLocalSGDOptimizer

    class PostLocal(PostLocalSGDOptimizer):
        def step(self, closure: Any = None) -> Any:
            loss = closure()
            super().step()
            return loss

    return PostLocal(inner, Averager())


class Wrapped(Net):
    """Has three optimizers that wrap another one. Each has a scheduler; the module holds a group."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, second, _, third = self.layers
        inner = [torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9) for one in (first, second, third)]
        optimizers = [Wraps(inner[0]), Lookahead(inner[1]), post_local(inner[2])]
        self.group = optimizers[0].param_groups[0]
        schedulers = [
            Phases(optimizers[0]),
            Warmup(optimizers[1], ExponentialLR(optimizers[1], 0.9)),
            Warmup(optimizers[2], CosineAnnealingLR(optimizers[2], 20)),
        ]
        return [{"optimizer": one, "lr_scheduler": own} for one, own in zip(optimizers, schedulers, strict=True)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizers = self.trainer.optimizers
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        self.group["weight_decay"] += 0.001
        for wrapped, scheduler in zip(self.optimizers(), self.lr_schedulers(), strict=True):
            wrapped.step()
            scheduler.step()
        inner = [getattr(one, "inner", None) or one.optim for one in optimizers]
        self.log_dict({str(number): total(one.state_dict()) for number, one in enumerate((*optimizers, *inner))})


def total(value: Any) -> float:
    """Return the sum of all numbers in a state."""
    return sum(float(one.double().sum()) if isinstance(one, Tensor) else float(one) for one in numbers(value))


def numbers(value: Any) -> Iterator[Any]:
    """Yield the numbers and tensors in a state."""
    if isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from numbers(one)
    elif isinstance(value, (int, float, Tensor)):
        yield value


def warm_up(optimizer: Any) -> LRScheduler:
    """Return a scheduler that can be pickled and that holds others, one in another."""
    return Warmup(
        optimizer, SequentialLR(optimizer, [CosineAnnealingLR(optimizer, 20), ExponentialLR(optimizer, 0.9)], [2])
    )


class Scheduled(Net):
    """Has one optimizer that wraps another one, and a scheduler from `make`; notes the rates."""

    def __init__(self, make: Any = warm_up) -> None:
        super().__init__()
        self.make = make
        self.rates: list[float] = []

    def configure_optimizers(self) -> Any:
        optimizer = Wraps(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.rates += [group["lr"] for group in self.trainer.optimizers[0].inner.param_groups]
        return super().training_step(batch, batch_idx)


class Slots:
    """Has no ``__dict__``; counts its calls, and steps what it holds."""

    __slots__ = ("num_calls", "scheduler")

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler
        self.num_calls = 0

    def __call__(self) -> None:
        self.num_calls += 1
        self.scheduler.step()
        self.scheduler.optimizer.param_groups[0]["momentum"] *= 1 - 0.001 * self.num_calls


class Held(LRScheduler):
    """Holds what refers to the optimizer in sets, slots, a closure, and the trainer."""

    def __init__(self, optimizer: Any, trainer: Trainer) -> None:
        self.trainer = trainer
        self.optimizers = frozenset({optimizer})
        self.parameters = set(optimizer.param_groups[0]["params"][:2])
        self.schedulers = {ExponentialLR(optimizer, 0.95)}
        self.slots = Slots(CosineAnnealingLR(optimizer, 20))
        self.decay = decay(optimizer)
        self.shape = lambda epoch: 0.97**epoch
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["lr"] * self.shape(self.last_epoch) for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        super().step()
        if self.last_epoch == 0:
            return
        for scheduler in self.schedulers:
            scheduler.step()
        self.slots()
        self.decay()
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["weight_decay"] += 0.001
        self.parameters.add(self.optimizer.param_groups[0]["params"][2 + self.last_epoch // 6])
        with torch.no_grad():
            for parameter in self.parameters:
                parameter.mul_(1 - 0.001 * self.trainer.global_step)


def decay(optimizer: Any) -> Any:
    """Return a function that counts, and changes a group."""
    num_calls = 0

    def step() -> None:
        nonlocal num_calls
        num_calls += 1
        optimizer.param_groups[0]["weight_decay"] += 0.001 * num_calls

    return step


class Plain(Net):
    """Has a plain optimizer, which the scheduler from `make` holds in other objects."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer, self), "interval": "step"}}


@pytest.mark.parametrize(
    "module",
    [
        Wrapped,
        lambda: Plain(lambda optimizer, _: warm_up(optimizer)),
        lambda: Plain(lambda optimizer, module: Held(optimizer, module.trainer)),
    ],
    ids=["wrapped", "plain", "held"],
)
def test_wrapped_schedulers_and_optimizers(module: Any) -> None:
    """Rates, weights, and the states of wrapping and wrapped optimizers are those of the uninterrupted run."""
    assert_exact(list, KillAt(8), module=module)


class OnRanks(RankNet):
    """Has an optimizer from `wrap` and a scheduler that wraps others; holds the group, and changes it."""

    def __init__(self, wrap: Any = None) -> None:
        super().__init__()
        self.wrap = wrap

    def configure_optimizers(self) -> Any:
        optimizer: Any = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        optimizer = optimizer if self.wrap is None else self.wrap(optimizer)
        self.group = optimizer.param_groups[0]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up(optimizer), "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.group["weight_decay"] += 0.001
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.wrap is not None:
            self.log("state", total(self.trainer.optimizers[0].state_dict()))
        return super().training_step(batch, batch_idx)


class OnShardingRanks(OnRanks, ShardedNet):
    """The same in shards of FSDP2."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning calls functions that torch has deprecated
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log:UserWarning")
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders:UserWarning")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered with this ProcessGroup:UserWarning")
@pytest.mark.filterwarnings("ignore:`_get_pg_default_device` will be deprecated:UserWarning")
@pytest.mark.parametrize("kind", ["wraps", "lookahead", "post-local", "fsdp1", "fsdp1-file", "fsdp2", "fsdp2-file"])
def test_wrapped_schedulers_and_optimizers_on_two_ranks(kind: str) -> None:
    """The same holds on two ranks, with each rank killed at another place, and under strategies that shard."""
    kinds: dict[str, tuple[Any, Any]] = {
        "wraps": (lambda: OnRanks(Wraps), "ddp"),
        "lookahead": (lambda: OnRanks(Lookahead), "ddp"),
        "post-local": (lambda: OnRanks(post_local), "ddp"),
        "fsdp1": (OnRanks, Fsdp1OnCpu(state_dict_type="sharded")),
        "fsdp1-file": (OnRanks, Fsdp1WholeOnCpu()),
        "fsdp2": (OnShardingRanks, fsdp2()),
        "fsdp2-file": (OnShardingRanks, fsdp2(save_distributed_checkpoint=False)),
    }
    module, strategy = kinds[kind]
    limits = {"limit_train_batches": 6, "limit_val_batches": 1}
    fit = rank_fit(2, module=module, strategy=strategy, **limits)
    assert_ranks_resume(fit, [KillAt(2, rank=0), KillAt(3, rank=1), KillAt(3, rank=0)])


class Saves(Callback):
    """Saves checkpoints before and after batch 3 of epoch 1, and at the end."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, trainer: Trainer, name: str, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (1, 3):
            trainer.save_checkpoint(self.directory / name)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "before.ckpt", batch_idx)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, _: Any, batch: Any, batch_idx: int) -> None:
        self.save(trainer, "after.ckpt", batch_idx)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        trainer.save_checkpoint(self.directory / "end.ckpt")


def fit_saving(directory: Path, module: Scheduled, **arguments: Any) -> None:
    """Fit with checkpoints of the user's, which hold any object."""
    callbacks = [FaultTolerance(directory / "autosaves"), Saves(directory)]
    fit_net(callbacks, directory, module=module, plugins=[AtomicCheckpointIO(weights_only=False)], **arguments)


def test_checkpoints_of_other_code(tmp_path: Path) -> None:
    """A run also continues from a checkpoint that holds schedulers as pickled by torch, and saves the same ones."""
    whole = Scheduled()
    fit_saving(tmp_path, whole)
    end = torch.load(tmp_path / "end.ckpt", weights_only=False)
    for name in ("before", "after"):
        module = Scheduled()
        fit_saving(tmp_path / name, module, ckpt_path=tmp_path / f"{name}.ckpt")
        assert module.rates == whole.rates
        saved = torch.load(tmp_path / name / "end.ckpt", weights_only=False)
        torch.testing.assert_close(saved["state_dict"], end["state_dict"], rtol=0, atol=0)
        torch.testing.assert_close(saved["optimizer_states"], end["optimizer_states"], rtol=0, atol=0)


class Grows(ExponentialLR):
    """Creates another scheduler while it trains."""

    def __init__(self, optimizer: Any) -> None:
        self.more: list[Any] = []
        super().__init__(optimizer, 0.9)

    def step(self, epoch: int | None = None) -> None:
        super().step()
        if self.last_epoch == 2:
            self.more.append(ExponentialLR(self.optimizer, 0.9))


class TwoInASet(ExponentialLR):
    """Holds two schedulers of a class in a set, which has another order in each process."""

    def __init__(self, optimizer: Any) -> None:
        self.more = {ExponentialLR(optimizer, 0.9), ExponentialLR(optimizer, 0.8)}
        super().__init__(optimizer, 0.9)


@pytest.mark.parametrize("kind", [Grows, TwoInASet])
def test_scheduler_that_is_not_found_again(kind: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A save warns of a scheduler that no later process creates, or could tell from another; a resume refuses it."""
    fit_saving(tmp_path, Scheduled(kind))
    assert caplog.text.count("a scheduler got a new ExponentialLR") == 1
    with pytest.raises(NotExactError, match="held a new ExponentialLR, which configure_optimizers does not create"):
        fit_saving(tmp_path / "resumed", Scheduled(kind), ckpt_path=tmp_path / "after.ckpt")
