"""How well the shuffle of a streaming data set mixes, and how many shards it keeps open.

The data is the hardest case: every shard is of one kind, as if images were written class by class. A batch is then as
good as independent samples only if it has samples of many shards. This writes the table of `docs/shuffles.md` and its
plot:

    python benchmarks/shuffles.py --output docs
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent.parent))
from lightning_faulttolerant.streaming.order.epoch import epoch_order

NUM_SHARDS, SHARD_SIZE, BATCH_SIZE = 100, 2_000, 256
NUM_EPOCHS = 20  # the spread is computed over these
_BLUE, _GREY = "#1f6fb4", "#8a8f98"

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One shuffle with its settings. Settings that are not given have their defaults."""

    name: str
    shuffle: bool = True
    block_size: int | None = None
    num_canonical_nodes: int = 1


CASES = (
    Case(name="`shuffle=False`", shuffle=False),
    Case(name="the default"),
    Case(name="8 canonical nodes", num_canonical_nodes=8),
    Case(name="blocks of 32 shards", block_size=32 * SHARD_SIZE),
)


def ids_of(case: Case, epoch: int = 0) -> Ints:
    """Return the samples of an epoch, in order."""
    order = epoch_order(
        [[SHARD_SIZE] * NUM_SHARDS],
        epoch=epoch,
        shuffle=case.shuffle,
        block_size=case.block_size,
        num_canonical_nodes=case.num_canonical_nodes,
    )
    return order.sample_ids(np.arange(order.num_positions))


def measure(case: Case) -> dict[str, Any]:
    """Return a shuffle's values for the table and the plot."""
    epochs = [ids_of(case, epoch) // SHARD_SIZE for epoch in range(NUM_EPOCHS)]
    shards = epochs[0]
    batches = [of_epoch[: len(of_epoch) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE) for of_epoch in epochs]
    means = np.concatenate([of_epoch.mean(1) for of_epoch in batches])
    # With independent draws, the spread of the batch means is that of the samples divided by the root of the batch
    # size.
    spread = means.std() / shards.std() * BATCH_SIZE**0.5
    opened = open_shards(shards)
    return {
        "first": len(np.unique(batches[0][0])),
        "batch": float(np.mean([len(np.unique(batch)) for batch in batches[0]])),
        "open": int(opened.max()),
        "spread": float(spread),
        "opened": opened,
        "shards": shards,
    }


def open_shards(shards: Ints) -> Ints:
    """Return the number of open shards at each position: first read at or before it, last read at or after it."""
    _, first = np.unique(shards, return_index=True)
    _, last = np.unique(shards[::-1], return_index=True)
    changes = np.zeros(len(shards) + 1, np.int64)
    np.add.at(changes, first, 1)
    np.add.at(changes, len(shards) - last, -1)
    return np.cumsum(changes)[:-1]


def table(figures: Mapping[str, Any]) -> str:
    """Return the rows of the page."""
    head = ["", "shards in the first batch", "shards in a batch", "shards open at most", "spread of batches"]
    rows = [
        [name, str(found["first"]), f"{found['batch']:.0f}", str(found["open"]), f"x{found['spread']:.1f}"]
        for name, found in figures.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---", *["--:"] * 4], *rows])


def draw(path: Path, figures: Mapping[str, Any], cases: Sequence[Case]) -> None:
    """Draw where the samples of each shard are read, and below it how many shards are open."""
    import matplotlib  # not needed for the table

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "shuffles", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = pyplot.subplots(
        2, len(cases), figsize=(2.1 * len(cases), 4), layout="constrained", sharex=True, sharey="row",
        height_ratios=(3, 1),
    )  # fmt: skip
    for column, case in enumerate(cases):
        found = figures[case.name]
        shards = found["shards"]
        positions = np.arange(len(shards)) * 100 / len(shards)
        density, *_ = np.histogram2d(shards, positions, bins=100)
        above, below = axes[:, column]
        extent = (0, 100, 0, NUM_SHARDS)
        above.imshow(
            density, origin="lower", aspect="auto", extent=extent, cmap="Blues", vmax=150, interpolation="none"
        )
        above.set_title(case.name.replace("`", "").replace(", ", ",\n"), fontsize=9)
        below.plot(positions[::500], found["opened"][::500], color=_BLUE, linewidth=1.5)
        below.axhline(NUM_SHARDS, color=_GREY, linewidth=0.6)
        below.spines[["top", "right"]].set_visible(False)
    axes[0, 0].set_ylabel("shard")
    axes[1, 0].set_ylabel("shards open")
    axes[1, len(cases) // 2].set_xlabel("position in the epoch, %")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    """Measure all shuffles, print the table, and write it and the plot to the docs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="the directory of shuffles.md and shuffles.svg")
    options = parser.parse_args(arguments)
    figures = {case.name: measure(case) for case in CASES}
    print(table(figures))
    if options.output is not None:
        page = options.output / "shuffles.md"
        filled = re.sub(
            r"<!-- table -->\n.*?<!-- end -->",
            lambda _: f"<!-- table -->\n{table(figures)}\n<!-- end -->",
            page.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        page.write_text(filled, encoding="utf-8")
        draw(options.output / "shuffles.svg", figures, CASES)


if __name__ == "__main__":
    main()
