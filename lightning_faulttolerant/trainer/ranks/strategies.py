"""The strategies that are served, and what is special about them: where their ranks meet, and DDP's sums.

A strategy is served if it is one of these classes, or derives from one and saves and loads as that one does. All others
are refused at the start, before anything is written.

Ranks that torchrun starts again meet in a part of its store that no earlier rank has written to. torchrun's agent keeps
one store for all starts of its ranks, and in the store the addresses of those that have died (pytorch issue 135712). A
rank that looks before a restarted one has written its own address finds the old one. So the ranks of a start first
agree on a prefix for their keys. They can't derive it from the number of the restart: each agent counts its own, and
when a machine joins or leaves, all ranks start again without being counted.

From three ranks on, the last bits of a sum of gradients depend on the order in which DDP sums them. DDP sums the
gradients of many parameters together, in buckets, and each rank begins the sum of another part of a bucket. So the
order of summation of a gradient depends on its place. DDP lays its buckets out in the order in which parameters were
created. After its first backward, it lays them out again, in the order in which gradients come. A process that
continues would have the first layout again for its first batch.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final, final

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.errors import RanksLostError, UnsupportedTrainerError
from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.ranks.compat import (
    cluster_environment,
    hooks_with_state,
    is_after_its_first_backward,
    reduction_order,
    set_reduction_order,
    why_not_reordered,
)
from lightning_faulttolerant.trainer.ranks.connection import LOOPBACK, Hub, Line, Relay, Spoke
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup

BUCKETS: Final = "buckets"
_LAST_BITS = "the arithmetic may differ in the last bits"
_MIN_RANKS = 3  # a + b equals b + a


@final
class Buckets:
    """The layout of DDP's buckets in one fit.

    Args:
        trainer: The trainer of the fit; its strategy is set up.
    """

    def __init__(self, trainer: Trainer) -> None:
        model: object = trainer.strategy.model
        is_ddp = isinstance(model, DistributedDataParallel)
        self._hooks = hooks_with_state(model) if is_ddp else []
        self._ddp: object = model if is_ddp and trainer.world_size >= _MIN_RANKS else None
        self._order: list[int] | None = None
        self._is_laid_out = False

    def state_dict(self) -> dict[str, object]:
        """Return the current order."""
        if self._ddp is None:
            return {}
        if self._is_laid_out:  # DDP would report it relative to that order
            return {"order": self._order}
        order = reduction_order(self._ddp)
        is_lost = order is None and is_after_its_first_backward(self._ddp)
        return {"order": order, "is_lost": True} if is_lost else {"order": order}

    def why_not_exact(self) -> list[str]:
        """Return what DDP keeps from batch to batch and no checkpoint holds."""
        reason = (
            "keeps a state from batch to batch, such as PowerSGD's errors. No checkpoint holds it, so it begins again"
        )
        return [f"DDP's communication hook {name} {reason}" for name in self._hooks]

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Lay the buckets out in the saved order of rank 0; a collective.

        Returns:
            Why the sums of some batches may differ in their last bits, if they may.
        """
        order = state.get("order")
        if self._ddp is None:
            return []
        if state.get("is_lost"):
            return [f"{_LAST_BITS}: with static_graph=True, DDP reports the order of gradients only after two batches"]
        reason = None if order is None else why_not_reordered(self._ddp, order)
        if reason is not None:
            return [f"{_LAST_BITS}: DDP's buckets can't be restored: {reason}"]
        if order is not None:
            set_reduction_order(self._ddp, order)
            self._order, self._is_laid_out = list(order), True
        return []


# All ranks wait for a save on rank 0, for as long as torch waits for a collective.
_TIMEOUT = timedelta(minutes=30)


def connect(trainer: Trainer) -> Ranks:
    """Connect the ranks of a fit when its process group exists; all of them at the same time."""
    if trainer.world_size == 1:
        return Alone()
    environment = cluster_environment(trainer)
    return connect_all("127.0.0.1" if environment is None else environment.main_address)


def connect_all(host: str = "127.0.0.1") -> NodeGroup:
    """Connect all ranks of the default process group.

    Args:
        host: The host at which all nodes can reach rank 0.
    """
    # The store in which the default group has met, so the ranks of an earlier start are not in it (`rendezvous`).
    store = _get_default_store()
    return NodeGroup(store, _TIMEOUT, rank=dist.get_rank(), num_ranks=dist.get_world_size(), host=host)


def open_line(ranks: NodeGroup) -> Line:
    """Open the line between ranks, with the connections that they have for exchanges; all of them at the same time."""
    token: str = ranks.from_first("the line", secrets.token_hex(16))
    is_reached_by = "" if ranks.rank == 0 else LOOPBACK  # the others only pass on what ranks of their own node send
    hub = Hub(token, is_reached_by) if ranks.rank == 0 or ranks.below else None
    ports = ranks.to_all("the ports of the line", hub and hub.port)
    if hub is not None:
        hub.wait_for(len(ranks.below))
        if ranks.rank == 0:
            return hub
    spoke = Spoke(ranks.rank, (ranks.host, ports[ranks.above]), token, hub_rank=ranks.above)
    return spoke if hub is None else Relay(hub, spoke)


_CALLS = "lightning_faulttolerant/calls"
"""The key under which all ranks of all starts leave their names, which no other rank has ever had."""
_POLL_SECONDS = 0.01


def apart_from_earlier_ranks(setup_environment: Method) -> object:
    """Let a strategy set its environment up. If it creates the process group, the ranks meet apart from earlier ones.

    Everything else about the group is as Lightning has it: its backend, its timeout, its device, and its end.
    """
    patches = Patches()
    # The store of an agent may have started others: it starts its ranks again when a machine joins.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        patches.around(dist, "init_process_group", _create_group)
    try:
        return setup_environment()
    finally:
        patches.undo()


def _create_group(create: Method, *positional: object, **arguments: Any) -> object:
    """Create a process group, in its own store, unless the caller says where the ranks meet."""
    if len(positional) > 1 or not {"init_method", "store"}.isdisjoint(arguments):
        return create(*positional, **arguments)
    timeout = arguments.get("timeout") or default_pg_timeout
    asked = {name: arguments[name] for name in ("rank", "world_size") if name in arguments}
    store, rank, num_ranks = next(rendezvous("env://", **asked, timeout=timeout))
    store.set_timeout(timeout)
    prefix = agree_on_prefix(store, rank=rank, num_ranks=num_ranks, timeout=timeout)
    own = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return create(*positional, **{**arguments, "store": own, "rank": rank, "world_size": num_ranks})


def agree_on_prefix(store: Any, *, rank: int, num_ranks: int, timeout: timedelta) -> str:
    """Return the prefix of this start; all of its ranks call this at the same time.

    Each rank leaves a new name, and rank 0 answers all names that it finds. Dead ranks have left theirs too, but do not
    take the answer. An answer to a name that is this rank's own comes from the rank 0 of this start.

    Args:
        store: The store of the agent.
        rank: The number of this rank.
        num_ranks: The number of ranks.
        timeout: How long rank 0 waits for the others; how long they wait is set in the store.

    Raises:
        RanksLostError: If not all ranks come in time.
    """
    name = secrets.token_hex(8)
    if rank:
        store.append(_CALLS, f"{name} ")
        prefix: str = store.get(name).decode()
        store.add(f"{prefix}/others", 1)
        return prefix
    answered: set[str] = set()
    deadline = time.monotonic() + timeout.total_seconds()
    while (num_others := store.add(f"{name}/others", 0)) < num_ranks - 1:
        if time.monotonic() > deadline:
            raise RanksLostError(
                f"Only {num_others + 1} of {num_ranks} ranks have connected to torchrun's store within"
                f" {timeout.total_seconds():g} seconds. The logs of the others say why they have not."
            )
        calls = store.get(_CALLS).decode().split() if store.check([_CALLS]) else []
        for call in calls:
            if call not in answered:
                store.set(call, name)
                answered.add(call)
        time.sleep(_POLL_SECONDS)
    return name


SUPPORTED: tuple[type[Strategy], ...] = (SingleDeviceStrategy, DDPStrategy, FSDPStrategy, ModelParallelStrategy)

_XLA = (
    "On XLA devices, steps run lazily and torch_xla writes the checkpoints. No test has shown that a run continues "
    "exactly there"
)
# These derive from supported strategies. What each does that autosaves can't handle, and what to use instead.
REFUSED: Mapping[type[Strategy], str] = {
    XLAStrategy: _XLA,
    SingleDeviceXLAStrategy: _XLA,
    DeepSpeedStrategy: (
        "DeepSpeed's checkpoints lack its place in an accumulation window and the gradients so far, and no public name "
        'leads to them. Use strategy=FSDPStrategy(state_dict_type="sharded") or ModelParallelStrategy(), which shard '
        "weights, gradients, and optimizer states as ZeRO 3 does"
    ),
}
_ADVICE = (
    "Use a strategy that docs/strategies.md lists, or leave the callback out. PL_FAULT_TOLERANT_TRAINING=0 leaves it "
    "out, too."
)
# Autosaves of one file are written without the strategy, and restored by Lightning's connector.
_OWN_FORMAT = ("save_checkpoint", "load_checkpoint")


def check_strategy(strategy: Strategy) -> None:
    """Raise if a strategy can't be served.

    Raises:
        UnsupportedTrainerError: With the reason, and what to do.
    """
    kind = type(strategy)
    for refused, reason in REFUSED.items():
        if isinstance(strategy, refused):
            raise UnsupportedTrainerError(f"FaultTolerance does not support {kind.__name__}. {reason}. {_ADVICE}")
    base = next((known for known in SUPPORTED if isinstance(strategy, known)), None)
    if base is None:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not support the strategy {kind.__module__}.{kind.__name__}: it derives from none of "
            f"{', '.join(known.__name__ for known in SUPPORTED)}, so we can't know how it saves and what its ranks "
            f"hold. {_ADVICE}"
        )
    own = [name for name in _OWN_FORMAT if getattr(kind, name) is not getattr(base, name)]
    if own:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not support the strategy {kind.__module__}.{kind.__name__}: it derives from "
            f"{base.__name__} and has its own {' and its own '.join(own)}. An autosave would be written without it, "
            f"or in an unknown form. {_ADVICE}"
        )


def can_be_evaluated(trainer: Trainer) -> bool:
    """Return whether an evaluation of this trainer can be resumed. If not, it runs as it is.

    It can't under a strategy that is not served, nor if a BatchSizeFinder runs the loop several times at
    its start.
    """
    has_finder = any(isinstance(callback, BatchSizeFinder) for callback in callbacks(trainer))
    if has_finder:
        return False
    try:
        check_strategy(trainer.strategy)
    except UnsupportedTrainerError:
        return False
    return True
