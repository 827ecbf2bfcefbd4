"""Draw the losses of an uninterrupted run and of one that was killed, with the kills and what was run twice."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from comparison import Event, Place, Process, loss, place, run_twice
from matplotlib import pyplot
from matplotlib.axes import Axes

_GREY, _RED, _SHADE = "#c3c7ce", "#c8102e", "#fbe3a2"
_COLORS = ("#1f6fb4", "#2a8a4a", "#7b4fa3", "#8c564b", "#d1618f")


def draw(path: Path, *, uninterrupted: Process, processes: Sequence[Process], num_batches: int, title: str) -> None:
    """Write the figure: all losses above, the surroundings of each kill below.

    Args:
        path: The PNG.
        uninterrupted: The run to compare with.
        processes: Of the run that was killed.
        num_batches: Of one epoch.
        title: What was found.
    """
    figure = pyplot.figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, len(processes) - 1, height_ratios=(3, 2))
    whole = figure.add_subplot(grid[0, :])
    _draw_losses(whole, uninterrupted, processes, num_batches)
    whole.legend(loc="upper right", frameon=False)
    whole.set_xlabel("batch of the run")
    for i in range(len(processes) - 1):
        zoom = figure.add_subplot(grid[1, i])
        _draw_losses(zoom, uninterrupted, processes, num_batches, marker="o")
        _zoom_in(zoom, i, uninterrupted, processes, num_batches)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_losses(
    axes: Axes, uninterrupted: Process, processes: Sequence[Process], num_batches: int, marker: str | None = None
) -> None:
    """Draw the runs over one another: the uninterrupted one broad and grey, each process of the other in its color."""
    axes.plot(
        *_curve(uninterrupted.of("step"), num_batches), color=_GREY, linewidth=5, marker=marker, markersize=13,
        solid_capstyle="round", label="uninterrupted",
    )  # fmt: skip
    for i, process in enumerate(processes):
        axes.plot(
            *_curve(process.of("step"), num_batches), color=_COLORS[i % len(_COLORS)], linewidth=1.2, marker=marker,
            markersize=9 - 4 * (i % 2), label=f"killed and restarted: process {i + 1}",
        )  # fmt: skip
    for i, (process, following) in enumerate(zip(processes, processes[1:], strict=False)):
        killed, start = _number(process.last, num_batches), _number(following.start, num_batches)
        axes.axvspan(start - 0.5, killed, color=_SHADE, zorder=0, linewidth=0, label=None if i else "run twice")
        axes.axvline(killed, color=_RED, linestyle="--", linewidth=1.3, label=None if i else "SIGKILL")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)


def _zoom_in(axes: Axes, i: int, uninterrupted: Process, processes: Sequence[Process], num_batches: int) -> None:
    process, following = processes[i], processes[i + 1]
    low, high = _number(following.start, num_batches) - 8, _number(process.last, num_batches) + 8
    numbers, losses = _curve(uninterrupted.of("step"), num_batches)
    seen = [value for number, value in zip(numbers, losses, strict=True) if low <= number <= high]
    margin = 0.15 * (max(seen) - min(seen))
    axes.set_xlim(low, high)
    axes.set_ylim(min(seen) - margin, max(seen) + margin)
    axes.set_xlabel("batch of the run")
    num_twice = len(run_twice(process, following))
    axes.set_title(f"Kill {i + 1}: {num_twice} batches run twice, with the same losses", fontsize=11)


def _curve(steps: Sequence[Event], num_batches: int) -> tuple[list[int], list[float]]:
    return [_number(place(step), num_batches) for step in steps], [loss(step) for step in steps]


def _number(where: Place, num_batches: int) -> int:
    """Return the number of a batch in the whole run."""
    epoch, batch = where
    return epoch * num_batches + batch
