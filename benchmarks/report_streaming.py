"""The tables of `docs/performance.md` on streaming data sets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Figures = Mapping[str, Any]

_LIBRARIES = {"mosaic": "MosaicML", "litdata": "LitData", "floor": "floor", "ours": "**ours**"}
# The least ratio of samples per second to MosaicML Streaming. The least ratio to LitData is 1 in any case.
TARGETS = {("small", 0): 6, ("small", 2): 4, ("big", 0): 3, ("big", 2): 2}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with text in its first column and figures in the others."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _machine(figures: Figures) -> str:
    found, of_order = figures["streaming"], figures["order"]["machine"]["load"]
    machine = found["machine"]
    return (
        f"{machine['date']}, {machine['cpu']} with {machine['cores']} cores, Python {machine['python']}, torch"
        f" {machine['torch']}, {found['versions']}, one torch thread, {found['rounds']} rounds. Load of the machine"
        f" while libraries were measured, their own included: {found['loads'][0]:.1f} to {found['loads'][-1]:.1f};"
        f" while orders were: {of_order}."
    )


def _speed(figures: Figures) -> str:
    rows = [
        [
            f"{data}, {case['workers']} workers{', shuffled' * case['shuffle']}",
            *(f"{case['medians'][name]:,.0f}" for name in _LIBRARIES),
            _ratio(case, "mosaic"),
            f"x{TARGETS[data, case['workers']]}",
            _ratio(case, "litdata"),
        ]
        for data, found in figures["streaming"]["cases"].items()
        for case in found["speed"]
    ]
    return table(["samples per second", *_LIBRARIES.values(), "to MosaicML", "at least", "to LitData"], rows)


def _first(figures: Figures) -> str:
    return table(
        ["time to the first batch", *_LIBRARIES.values(), "to MosaicML", "to LitData"],
        [_of_first(*row) for row in _cases(figures, "warm")],
    )


def _cold(figures: Figures) -> str:
    rows = [
        [*_of_first(data, case), *(f"{case['fetched'][name]:.0f}" for name in ("mosaic", "litdata", "ours"))]
        for data, case in _cases(figures, "cold")
    ]
    head = [*_LIBRARIES.values(), "to MosaicML", "to LitData", "shards: MosaicML", "LitData", "ours"]
    return table(["from an empty cache", *head], rows)


def _cases(figures: Figures, kind: str) -> list[tuple[str, Figures]]:
    return [(data, case) for data, found in figures["streaming"]["cases"].items() for case in found[kind]]


def _of_first(data: str, case: Figures) -> list[str]:
    return [
        f"{data}, {case['workers']} workers, at {case['at']:.0%}",
        *(f"{case['medians'][name] * 1e3:.0f} ms" for name in _LIBRARIES),
        _ratio(case, "mosaic"),
        _ratio(case, "litdata"),
    ]


def _ratio(case: Figures, name: str) -> str:
    of = case["ratios"][name]
    return f"**x{of['ratio']:.2f}** ({of['low']:.2f}-{of['high']:.2f})"


def _order(figures: Figures) -> str:
    rows = [
        [
            f"{int(count):,}",
            f"{found['shards']:,}",
            *(_cost(found[name]) if name in found else "" for name in ("mosaic", "ours")),
        ]
        for count, found in figures["order"]["sizes"].items()
    ]
    return table(["samples", "shards", "MosaicML", "**ours**"], rows)


def _positions(figures: Figures) -> str:
    found = figures["order"]["positions"]
    return table(
        ["at", *(f"{float(at):.0%}" for at in found)], [["10^9 samples", *(_cost(each) for each in found.values())]]
    )


def _cost(found: Figures) -> str:
    return f"{found['s'] * 1e3:.1f} ms, {found['bytes'] / 1e6:.1f} MB"


TABLES: dict[str, Callable[[Figures], str]] = {
    "streaming_machine": _machine,
    "streaming_speed": _speed,
    "streaming_first": _first,
    "streaming_cold": _cold,
    "streaming_order": _order,
    "streaming_positions": _positions,
}
