"""Where the ranks meet that torchrun starts again: in a part of its store that no earlier rank has written to.

torchrun's agent keeps one store for all starts of its ranks, and in the store the addresses of those that have died
(pytorch issue 135712). A rank that looks before a restarted one has written its own address finds the old one. So the
ranks of a start first agree on a prefix for their keys. They can't derive it from the number of the restart: each agent
counts its own, and when a machine joins or leaves, all ranks start again without being counted.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from lightning_faulttolerant.errors import RanksLostError
from lightning_faulttolerant.trainer.patches import Method, Patches

_CALLS = "lightning_faulttolerant/calls"
"""The key under which all ranks of all starts leave their names, which no other rank has ever had."""
_POLL_SECONDS = 0.01


def shares_store(environment: Mapping[str, str]) -> bool:
    """Return whether the ranks are to meet in the store of an agent that may have started, or may start, others."""
    may_restart = environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    return may_restart and environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def apart_from_earlier_ranks(setup_environment: Method) -> Any:
    """Let a strategy set its environment up. If it creates the process group, the ranks meet apart from earlier ones.

    Everything else about the group is as Lightning has it: its backend, its timeout, its device, and its end.
    """
    patches = Patches()
    if shares_store(os.environ):
        patches.around(dist, "init_process_group", _create_group)
    try:
        return setup_environment()
    finally:
        patches.undo()


def _create_group(create: Method, *positional: Any, **arguments: Any) -> Any:
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
                f"Only {num_others + 1} of {num_ranks} ranks have come to torchrun's store within"
                f" {timeout.total_seconds():g} seconds. The logs of the others say why they have not."
            )
        calls = store.get(_CALLS).decode().split() if store.check([_CALLS]) else []
        for call in calls:
            if call not in answered:
                store.set(call, name)
                answered.add(call)
        time.sleep(_POLL_SECONDS)
    return name
