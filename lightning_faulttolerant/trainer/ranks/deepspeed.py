"""DeepSpeed's engine under ZeRO 1 and 2: the served configurations, and the state that its checkpoints lack.

The engine saves and loads weights, partitions of the optimizer, and the loss scale. It does not save what exists only
between two optimizer steps: its place in the accumulation window, and the gradients so far. Their names are
DeepSpeed's, checked on 0.19.8.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor

from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.ranks.compat import gradient_buffer_of

_SERVED_STAGES = (1, 2)
_SERVED = frozenset({
    "activation_checkpointing", "aio", "bf16", "dump_state", "fp16", "gradient_accumulation_steps",
    "gradient_clipping", "steps_per_print", "train_batch_size", "train_micro_batch_size_per_gpu",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "zero_optimization",
})  # fmt: skip
_SERVED_OF_ZERO = frozenset({
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
    "load_from_fp32_weights", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "stage", "sub_group_size",
})  # fmt: skip

_COUNTERS: Final = ("micro_steps", "global_steps", "global_samples", "skipped_steps", "_global_grad_norm")
_OF_PARAMETERS: Final = ("grad", "grad_accum")
_OF_OPTIMIZER: Final = ("all_grad_tensors", "averaged_gradients")


def why_not_served(strategy: DeepSpeedStrategy) -> str | None:
    """Return why a run with the strategy's configuration could not continue exactly, or ``None`` if it can."""
    config: Mapping[str, Any] = strategy.config if isinstance(strategy.config, dict) else {}
    zero = config.get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in _SERVED_STAGES:
        return f"It is supported with ZeRO stage 1 and 2, and this is stage {stage}"
    unknown = [f"zero_optimization.{name}" for name, value in zero.items() if name not in _SERVED_OF_ZERO and value]
    unknown += [name for name, value in config.items() if name not in _SERVED and value]
    if unknown:
        return f"No test has shown that a run continues exactly with {', '.join(sorted(unknown))} in its config"
    if not zero.get("load_from_fp32_weights", True):
        return "With load_from_fp32_weights=False, it restores the optimizer's weights from rounded ones"
    if strategy.exclude_frozen_parameters:
        return "With exclude_frozen_parameters=True, its checkpoints lack the frozen parameters"
    return None


def engine_of(trainer: Trainer) -> Any | None:
    """Return DeepSpeed's engine once it trains, or ``None`` under any other strategy."""
    strategy = trainer.strategy
    if not isinstance(strategy, DeepSpeedStrategy) or not hasattr(strategy.model, "micro_steps"):
        return None
    return strategy.model


def unwrapped(optimizer: Any) -> Any:
    """Return the user's optimizer if it is in one of DeepSpeed's, which has no ``defaults``."""
    return optimizer if hasattr(optimizer, "defaults") else optimizer.optimizer


def users_optimizers(trainer: Trainer) -> list[Any]:
    """Return the optimizers that the user created; DeepSpeed's keep them inside."""
    return [unwrapped(optimizer) for optimizer in trainer.optimizers]


def engine_state(trainer: Trainer) -> dict[str, Any]:
    """Return what the engine's checkpoint lacks on this rank: its counters, and gradients of an open window.

    Raises:
        UnsupportedTrainerError: If the engine or its optimizer has not the attributes that we know.
    """
    engine = engine_of(trainer)
    if engine is None:
        return {}
    optimizer = engine.optimizer
    unknown = [name for name in _COUNTERS if not hasattr(engine, name)]
    unknown += [name for name in _OF_OPTIMIZER if not hasattr(optimizer, name)]
    if unknown:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not know this version of DeepSpeed, or its {type(optimizer).__name__}: it has no "
            f"{', '.join(unknown)}, and gradients of an accumulation window could not be saved. Use DeepSpeed 0.19.8 "
            "with ZeRO 1 or 2, or leave the callback out."
        )
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        **{name: _of_parameters(trainer, name) for name in _OF_PARAMETERS},
        # ZeRO 2 reduces the gradients of each batch, and adds them up in the partition of each rank.
        "partitions": {str(i): [g.clone() for g in grads] for i, grads in optimizer.all_grad_tensors.items() if grads},
        "buffers": {
            str(i): grads.flat_partition.clone()
            for i, grads in optimizer.averaged_gradients.items()
            if grads is not None
        },
    }


def load_engine_state(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Restore what `engine_state` returned, once the engine has loaded its checkpoint."""
    engine = engine_of(trainer)
    if engine is None or not state:
        return
    for name, value in state["counters"].items():
        setattr(engine, name, value)
    parameters = dict(trainer.lightning_module.named_parameters())
    for attribute in _OF_PARAMETERS:
        for name, gradient in state[attribute].items():
            setattr(parameters[name], attribute, gradient.to(parameters[name].device, copy=True))
    optimizer, device = engine.optimizer, engine.device
    for number, gradients in state["partitions"].items():
        optimizer.all_grad_tensors[int(number)] = [gradient.to(device, copy=True) for gradient in gradients]
    for number, flat in state["buffers"].items():
        gradient_buffer_of(optimizer, int(number)).copy_(flat)


def _of_parameters(trainer: Trainer, attribute: str) -> dict[str, Tensor]:
    found = ((name, getattr(p, attribute, None)) for name, p in trainer.lightning_module.named_parameters())
    return {name: gradient.detach().clone() for name, gradient in found if gradient is not None}


def stepped_tensors(trainer: Trainer) -> list[Tensor]:
    """Return the tensors that the optimizer steps: it copies them into the parameters without a trace."""
    if engine_of(trainer) is None:
        return []
    groups = (group for optimizer in trainer.optimizers for group in optimizer.param_groups)
    return [parameter for group in groups for parameter in group["params"]]


@contextlib.contextmanager
def failing_together(trainer: Trainer) -> Iterator[None]:
    """Within the block, let a rank that can't write finish the engine's save: the others wait for it in a barrier.

    Raises:
        Exception: At the end of the block, what its writes have raised.
    """
    engine = engine_of(trainer)
    if engine is None:
        yield
        return
    failures: list[Exception] = []

    def save(original: Any, *args: object, **kwargs: object) -> None:
        try:
            original(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    patches = Patches()
    patches.around(engine.checkpoint_engine, "save", save)
    try:
        yield
    finally:
        patches.undo()
    if failures:
        raise failures[0]
