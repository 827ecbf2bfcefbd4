"""A module that logs a value late, and what TensorBoard shows of a run."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.runs import Net


class LateNet(Net):
    """Has hyperparameters, and logs one more value from its fourth batch on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step >= 3:
            self.log("a late, one", batch.mean())
        return super().training_step(batch, batch_idx)


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard shows of a run, except the marker of hyperparameters, which has no step."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
