"""The parts of a run that Lightning saves and restores: where each is in a checkpoint, and what its live value is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.schema import Instead
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.state import as_saved
from lightning_faulttolerant.trainer.objects.roots import schedulers_of
from lightning_faulttolerant.trainer.resume.schedulers import Schedulers


@dataclass(frozen=True, slots=True)
class LightningPart:
    """One part of Lightning's checkpoint.

    Args:
        name: Its name in lines about values that differ.
        keys: The keys that lead to it.
        read: Reads its live value.
        is_captured: Whether a capture copies it.
        is_of_rank: Whether it may differ between ranks.
    """

    name: str
    keys: tuple[str, ...]
    read: Callable[[], Any]
    is_captured: bool = True
    is_of_rank: bool = False

    def find(self, checkpoint: Mapping[str, Any]) -> Any:
        """Return its value in a checkpoint; an empty dict if it has none."""
        value: Any = checkpoint
        for key in self.keys:
            value = value.get(key, {})
        return value

    def put(self, checkpoint: dict[str, Any], instead: Instead) -> None:
        """Replace its value in a checkpoint by that of a capture."""
        *outer, key = self.keys
        owner: dict[str, Any] = checkpoint
        for name in outer:
            owner = owner[name]
        if key in owner:
            owner[key] = instead[self.name]  # type: ignore[literal-required]


def lightnings(trainer: Trainer, schedulers: Schedulers | None = None) -> tuple[LightningPart, ...]:
    """Return the parts of a trainer's checkpoint.

    Args:
        trainer: The trainer.
        schedulers: Reads its schedulers; needed only to read them.
    """

    def read_schedulers() -> object:
        states = [one.state_dict() for one in schedulers_of(trainer)]
        return states if schedulers is None else schedulers.plain(states)

    def read_callbacks() -> dict[str, object]:
        states = {one.state_key: one.state_dict() for one in compat.callbacks(trainer)}
        return {key: state for key, state in states.items() if state}

    def read_weights() -> object:
        return as_saved(trainer, trainer.strategy.lightning_module_state_dict())

    precision = trainer.precision_plugin
    return (
        LightningPart("weights", ("state_dict",), read_weights, is_captured=False),
        LightningPart(
            "optimizers", ("optimizer_states",), lambda: [one.state_dict() for one in trainer.optimizers],
            is_captured=False,
        ),
        LightningPart("schedulers", ("lr_schedulers",), read_schedulers, is_of_rank=True),
        LightningPart("loops", ("loops", "fit_loop"), trainer.fit_loop.state_dict),
        LightningPart("callbacks", ("callbacks",), read_callbacks, is_of_rank=True),
        LightningPart("precision", (type(precision).__qualname__,), precision.state_dict, is_of_rank=True),
    )  # fmt: skip


def weights_in(checkpoint: Mapping[str, Any]) -> Any:
    """Return the weights that were trained: WeightAveraging stores the averages as the ``state_dict``."""
    return checkpoint.get("current_model_state", checkpoint.get("state_dict", {}))


def as_captured(checkpoint: Mapping[str, object], instead: Instead | None, trainer: Trainer) -> Mapping[str, object]:
    """Return Lightning's checkpoint, with the parts that may differ between ranks as they were at a capture."""
    if instead is None:
        return checkpoint
    found = {**checkpoint}
    for part in lightnings(trainer):
        if part.is_of_rank:
            part.put(found, instead)
    return found
