"""Draw the losses of an uninterrupted run and of a run that was killed, with the kills and the repeated batches."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from comparison import Place, Process, loss, place, run_twice
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

_GREY, _RED, _SHADE = "#c3c7ce", "#c8102e", "#fbe3a2"
_COLORS = ("#1f6fb4", "#2a8a4a", "#7b4fa3")


def draw(path: Path, *, uninterrupted: Process, processes: Sequence[Process], num_batches: int, title: str) -> None:
    """Write the figure: all losses at the top, the batches around each kill below.

    Args:
        path: Path of the PNG file.
        uninterrupted: The run to compare with.
        processes: Processes of the run that was killed.
        num_batches: Number of batches in an epoch.
        title: The verdict, shown as the title.
    """
    figure = pyplot.figure(figsize=(11, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, len(processes) - 1, height_ratios=(3, 2))
    whole = figure.add_subplot(grid[0, :])
    _draw_losses(whole, uninterrupted, processes, num_batches)
    whole.margins(x=0.01)
    whole.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6, frameon=False)
    for i, (killed, following) in enumerate(pairwise(processes)):
        zoom = figure.add_subplot(grid[1, i])
        _draw_losses(zoom, uninterrupted, processes, num_batches, marker="o")
        _zoom_in(zoom, _lost(killed, following, num_batches), _curve(uninterrupted, num_batches))
        zoom.set_title(f"SIGKILL {i + 1}, batches run twice: {len(run_twice(killed, following))}", fontsize=11)
    figure.suptitle(title, fontsize=14, fontweight="bold")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _draw_losses(
    axes: Axes, uninterrupted: Process, processes: Sequence[Process], num_batches: int, marker: str | None = None
) -> None:
    """Draw the runs over one another: the uninterrupted one broad and gray underneath, each process in its color."""
    broad = {"color": _GREY, "linewidth": 5, "markersize": 15, "solid_capstyle": "round"}
    axes.plot(*_curve(uninterrupted, num_batches), marker=marker, **broad, label="uninterrupted")
    for i, process in enumerate(processes):
        # Later processes get smaller markers, so that both are visible where two processes ran.
        thin = {"color": _COLORS[i % len(_COLORS)], "linewidth": 1.3, "markersize": max(3, 10 - 3 * i)}
        axes.plot(*_curve(process, num_batches), marker=marker, **thin, label=f"killed run, process {i + 1}")
    for i, (killed, following) in enumerate(pairwise(processes)):
        start, end = _lost(killed, following, num_batches)
        axes.axvspan(start, end, color=_SHADE, zorder=0, linewidth=0, label=None if i else "run twice")
        axes.axvline(end, color=_RED, linestyle="--", linewidth=1.5, label=None if i else "SIGKILL")
    axes.set_xlabel("batch of the run")
    axes.set_ylabel("training loss")
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _zoom_in(axes: Axes, lost: tuple[float, float], curve: tuple[list[int], list[float]]) -> None:
    low, high = lost[0] - 8.3, lost[1] + 8.3
    seen = [value for number, value in zip(*curve, strict=True) if low <= number <= high]
    margin = 0.15 * (max(seen) - min(seen))
    axes.set_xlim(low, high)
    axes.set_ylim(min(seen) - margin, max(seen) + margin)


def _lost(killed: Process, following: Process, num_batches: int) -> tuple[float, float]:
    """Return the range of batch numbers that a killed process lost."""
    start = _number(following.start, num_batches) - 0.5
    return start, start + len(run_twice(killed, following))


def _curve(process: Process, num_batches: int) -> tuple[list[int], list[float]]:
    steps = process.of("step")
    return [_number(place(step), num_batches) for step in steps], [loss(step) for step in steps]


def _number(where: Place, num_batches: int) -> int:
    """Return the number of a batch in the whole run."""
    epoch, batch = where
    return epoch * num_batches + batch
