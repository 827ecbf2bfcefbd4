"""Private names of torch's DistributedDataParallel that we use, read in torch 2.4 and run on 2.13.

`SEAMS` lists them for the contract test, with what breaks without each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

SEAMS = {
    "ddp._get_ddp_logging_data": "the order of gradients in the buckets of three and more ranks",
    "ddp._build_params_for_reducer": "the same",
    "ddp._build_debug_param_to_name_mapping": "the same",
    "ddp._ddp_init_helper": "the same",
    "ddp._use_python_reducer": "the same under torch.compile's own reducer, which has none",
    "ddp._delay_all_reduce_params": "the same where some gradients are reduced together at the end",
    "ddp._comm_hooks": "communication hooks of such a run",
    "ddp.reducer._remove_autograd_hooks": "the same order: gradients would be reduced twice",
    "ddp.reducer._push_all_rebuilt_params": "the same order",
    "ddp.reducer._rebuild_buckets": "the same order",
    "ddp.reducer._set_static_graph": "the same order with static_graph=True",
    "ddp.logger._set_static_graph": "the same order with static_graph=True",
    "ddp._sync_buffers": "slow ranks of models with buffers: the others wait there before the forward pass",
}

SYNC_BUFFERS = "_sync_buffers"
"""The method in which DDP copies rank 0's buffers to all ranks, before each forward pass."""

_REBUILT = "rebuilt_per_bucket_param_indices"
_READY = "prev_iteration_grad_ready_order_indices"


def reduction_order(ddp: Any) -> list[int] | None:
    """Return the order of gradients in DDP's buckets from the next batch on, by number.

    ``None`` as long as it is the first layout, which a new DDP has too.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        return None  # never rebuilt
    data = ddp._get_ddp_logging_data()
    if not data.get("has_rebuilt_buckets"):
        ddp.logger.set_runtime_stats_and_log()  # DDP reports each batch only when the next one begins
        data = ddp._get_ddp_logging_data()
    text = data.get(_REBUILT) if data.get("has_rebuilt_buckets") else data.get(_READY)
    return [int(number) for number in text.replace(",", " ").split()] if text else None


def is_after_its_first_backward(ddp: Any) -> bool:
    """Return whether a static graph is recorded, but not yet the order of its gradients."""
    data = ddp._get_ddp_logging_data()
    return bool(ddp.static_graph and data.get("iteration") == 1 and not data.get(_READY))


def why_not_reordered(ddp: Any, order: Sequence[int]) -> str | None:
    """Return why `set_reduction_order` can't be called."""
    num_parameters = len(ddp._build_params_for_reducer()[0])
    if sorted(order) != list(range(num_parameters)):
        return f"{len(order)} parameters were reduced, and now {num_parameters} are"
    if ddp._use_python_reducer or ddp._delay_all_reduce_params or ddp.mixed_precision is not None:
        return "it is set up in a way that has an order of its own"
    return None


def set_reduction_order(ddp: Any, order: Sequence[int]) -> None:
    """Give DDP the buckets that it creates itself if gradients come in this order; a collective.

    DDP creates its buckets again after the first backward. A reducer does the same immediately if it gets the
    parameters in that order, and is told that all of them are ready.
    """
    parameters, are_sparse = ddp._build_params_for_reducer()
    ordered = [parameters[number] for number in order]
    ddp.reducer._remove_autograd_hooks()
    ddp._ddp_init_helper(
        ordered,
        [are_sparse[number] for number in order],
        ddp._build_debug_param_to_name_mapping(ordered),
        ddp.static_graph,
    )
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()


def hooks_with_state(ddp: Any) -> list[str]:
    """Return the communication hooks that keep a state from batch to batch."""
    kept: list[Any] = [(hook, state) for hook, state in ddp._comm_hooks if state is not None]
    return [
        getattr(hook, "__qualname__", type(hook).__qualname__)
        for hook, state in kept
        if not isinstance(state, dist.ProcessGroup)
    ]
