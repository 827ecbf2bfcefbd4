"""What TensorBoard shows of a run."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard shows of a run, except the marker of hyperparameters, which has no step."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
