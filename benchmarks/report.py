"""Put the measured figures into the tables of `docs/performance.md`, and draw its plot.

This module writes the parts between ``<!-- name -->`` and ``<!-- end -->``; the rest is written by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import report_streaming
from benchmarks.report_streaming import table
from benchmarks.start import TARGET_RATIO, TARGET_SECONDS

Figures = Mapping[str, Any]

# Measured: Lightning 1.9.5 with its own fault tolerance against Lightning 1.9.5 without it, on the same machine.
LIGHTNING_19 = {"plain": 1.58, "plain, 2 workers": 1.72, "metrics": 1.34}
_BLUE, _GREY, _RED = "#1f6fb4", "#8a8f98", "#c8102e"


def filled(page: str, figures: Figures) -> str:
    """Return the page with every table rebuilt."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        return f"<!-- {name} -->\n{TABLES[name](figures)}\n<!-- end -->"

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def _machine(figures: Figures) -> str:
    found = figures["overhead"]["machine"]
    loads = sorted(float(figures[part]["machine"]["load"]) for part in PARTS)
    return (
        f"{found['date']}, {found['cpu']} with {found['cores']} cores, {found['system']}, Python {found['python']},"
        f" torch {found['torch']}, Lightning {found['lightning']}, one torch thread. Load of the machine,"
        f" the benchmarks' own included: {loads[0]} to {loads[-1]}.{figures.get('note', '')}"
    )


def _overhead(figures: Figures) -> str:
    return _ratios(figures["overhead"])


def _ranks(figures: Figures) -> str:
    return _ratios(figures["ranks"])


def _ratios(measured: Figures) -> str:
    rows = [
        [
            name,
            f"{found['step_us']:.0f} µs",
            f"x{found['empty']['ratio']:.3f}",
            f"x{found['saves once']['ratio']:.3f}",
            f"**x{found['with']['ratio']:.3f}**",
            f"{found['with']['low']:.3f}-{found['with']['high']:.3f}",
            f"x{found['with, all steps']['ratio']:.3f}",
            "" if found["target"] is None else f"x{found['target']:.2f}",
        ]
        for name, found in measured["cases"].items()
    ]
    return table(
        ["", "a step", "empty callback", "saves once", "`FaultTolerance`", "90 %", "all steps", "at most"], rows
    )


def _calls(figures: Figures) -> str:
    rows = [[name, f"{microseconds:.1f} µs"] for name, microseconds in figures["parts"]["calls_us"].items()]
    return table(["", "each time"], rows)


def _saves(figures: Figures) -> str:
    rows = [
        [
            name,
            f"{found['bytes'] / 1e6:.2f} MB",
            *(f"{found[key] * 1e3:.0f} ms" for key in ("lightning_s", "autosave_s", "first_s")),
            f"every {found['autosave_s'] / 0.01:.1f} s",
        ]
        for name, found in figures["parts"]["saves"].items()
    ]
    head = ["model", "file", "`trainer.save_checkpoint`", "autosave", "the first", "by default"]
    return table(head, rows)


def _resume(figures: Figures) -> str:
    def compared(found: Figures) -> list[str]:
        return [f"**x{found['ratio']:.2f}**", f"{found['low']:.2f}-{found['high']:.2f}", f"x{found['target']:.1f}"]

    rows = [
        [
            name,
            f"{found['fresh_s']:.2f} s",
            f"{found['resumed_s']:.2f} s",
            *compared(found),
            f"{found['torchdata']['resumed_s']:.2f} s",
            *compared(found["torchdata"]),
        ]
        for name, found in figures["resume"]["cases"].items()
    ]
    theirs = ["torchdata, resumed", "ours to torchdata's", "range", "at most"]
    return table(["", "fresh", "resumed", "ratio", "range", "at most", *theirs], rows)


def _start(figures: Figures) -> str:
    def cell(found: Figures, mark: str = "") -> str:
        ratio = f"{mark}x{found['ratio']:.2f}{mark}"
        return f"{ratio} ({found['low']:.2f}-{found['high']:.2f}), {found['more_s']:+.2f} s"

    rows = [
        [
            name,
            f"{found['without']['seconds']:.2f} s",
            *(cell(found[kind]) for kind in ("fresh", "by Lightning")),
            cell(found["resumed"], mark="**"),
            f"x{TARGET_RATIO} or {TARGET_SECONDS:+} s",
        ]
        for name, found in figures["start"]["cases"].items()
    ]
    return table(["model", "without us", "fresh", "continued by Lightning", "resumed", "at most"], rows)


def _incremental(figures: Figures) -> str:
    found = figures["incremental"]
    values = {"bytes": (1e6, "MB"), "seconds": (1e-3, "ms")}
    rows = [
        [
            "time" if what == "seconds" else what,
            *(f"{found[what][name] / unit:,.0f} {of}" for name in found[what]),
            f"**{found['ratio'][what]:.1f}**",
            f"{found['low']:.1f}-{found['high']:.1f}" if what == "seconds" else "",
            f"{found['target'][what]:.0f}",
        ]
        for what, (unit, of) in values.items()
    ]
    names = [f"`{name}`" for name in found["bytes"]]
    return table(["", *names, "Lightning's to ours", "range", "at least"], rows)


def _ledger(figures: Figures) -> str:
    rows = [
        [
            name,
            f"{found['step_us'] / 1e3:.1f} ms",
            f"{found['added_us'] / 1e3:.2f} ms",
            f"**x{found['ratio']:.3f}**",
            f"{found['low']:.3f}-{found['high']:.3f}",
        ]
        for name, found in figures["ledger"]["cases"].items()
    ]
    return table(["", "a step", "added", "with a ledger", "90 %"], rows)


def _size(figures: Figures) -> str:
    rows = [
        [workers, f"{found['bytes'] / 1e3:.1f} kB", f"{found['target'] / 1e3:.0f} kB", f"{found['write_ms']:.2f} ms"]
        for workers, found in figures["size"]["cases"].items()
    ]
    return table(["workers", "our part", "at most", "to write it"], rows)


def _growth(figures: Figures) -> str:
    megabytes = {
        name: [f"{found[kind] / 1e6:.1f} MB" for kind in ("without", "ours")]
        for name, found in figures["growth"]["cases"].items()
    }
    return table(["", "without the callback", "with it"], [[name, *both] for name, both in megabytes.items()])


def _goodput(figures: Figures) -> str:
    def cell(found: Figures) -> str:
        return "given up" if found["goodput"] is None else f"{found['goodput']:.3f}"

    measured = figures["goodput"]["cases"]
    intervals = list(next(iter(measured.values()))["others"])
    rows = [
        [
            f"{mean} s",
            f"{found['ours']['runs']} x {found['steps'] * figures['goodput']['step_s']:.0f} s",
            str(found["ours"]["failures"]),
            f"**{cell(found['ours'])}**",
            *(cell(found["others"][interval]) for interval in intervals),
            "" if found["ratio"] is None else f"**x{found['ratio']:.3f}**",
        ]
        for mean, found in sorted(measured.items(), key=lambda each: float(each[0]))
    ]
    head = ["mean distance", "work", "failures", "`FaultTolerance()`", *(f"every {each} steps" for each in intervals)]
    ours = [found["ours"] for found in measured.values()]
    others = [each for found in measured.values() for each in found["others"].values() if each["goodput"] is not None]
    right = [
        f"{sum(each['right'] for each in runs)} of {sum(each['runs'] for each in runs)}" for runs in (ours, others)
    ]
    text = f"Runs with the right result: {right[0]} with `FaultTolerance()`, {right[1]} with `ModelCheckpoint`."
    load = figures["goodput"]["machine"]["load"]
    return f"{table([*head, 'to the best'], rows)}\n\n{text} Load of the machine meanwhile: {load}."


def _samplers(figures: Figures) -> str:
    def cells(found: Figures | None) -> list[str]:
        if found is None:
            return ["does not fit", "", ""]
        memory = f"{found['bytes'] / 1e6:,.1f} MB"
        return [f"{found['seek_s'] * 1e3:,.2f} ms", memory, f"{found['index_ns']:.0f} ns"]

    rows = [
        [length, f"`{name}`", *cells(found)]
        for length, samplers in figures["samplers"]["cases"].items()
        for name, found in samplers.items()
    ]
    text = table(["samples", "sampler", "to the position", "memory", "each later index"], rows)
    return f"{text}\n\nLoad of the machine meanwhile: {figures['samplers']['machine']['load']}."


def _gather(figures: Figures) -> str:
    cases = figures["gather"]["cases"]
    # Rank 0 unpickled the states before decision 66, and joins their bytes since then.
    known = ("network", "unpickle", "join", "check", "write", "save", "verify", "read")
    measured = next(iter(cases[_WORST]["ranks"].values()))
    pieces = [piece for piece in known if f"{piece}_s" in measured]
    rows = [
        [
            ranks,
            *(f"{of['ranks'][ranks]['part_bytes'] / 1e6:.1f} MB" for of in cases.values()),
            *(_duration(found[f"{key}_s"]) for found in [cases[_WORST]["ranks"][ranks]] for key in pieces),
        ]
        for ranks in cases[_WORST]["ranks"]
    ]
    head = ["ranks", *(f"our part, {name}" for name in cases)]
    return table([*head, *("**a save**" if piece == "save" else piece for piece in pieces)], rows)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _exchange(figures: Figures) -> str:
    rows = [
        [
            ranks,
            f"{found['connect_s'] * 1e3:.0f} ms",
            str(found["descriptors"]),
            f"{found['s'] * 1e3:.1f} ms",
            f"{found['processor_s'] * 1e3:.1f} ms",
        ]
        for ranks, found in figures["gather"]["exchanged"].items()
    ]
    return table(["processes", "to connect", "descriptors each", "an exchange", "processor time of rank 0"], rows)


def _pieces(figures: Figures) -> str:
    found = figures["gather"]
    rows = [
        *([f"state of a rank, {name}: taken", f"{of['state_s'] * 1e3:.1f} ms"] for name, of in found["cases"].items()),
        *([f"state of a rank, {name}: packed", f"{of['pack_s'] * 1e3:.1f} ms"] for name, of in found["cases"].items()),
        ["processor time of rank 0 for each message", f"{found['each_s'] * 1e3:.2f} ms"],
        ["assumed: network of rank 0", f"{found['bytes_per_second'] / 1e9:.2f} GB/s"],
        ["assumed: from one rank to the next", f"{found['hop_s'] * 1e6:.0f} µs"],
    ]
    return table(["", ""], rows)


def _stalls(figures: Figures) -> str:
    def cell(found: Figures) -> str:
        ratio = "" if found["ratio"] == 1 else f", **x{found['ratio']:.2f}**"
        return f"{found['stall_s'] * 1e3:.0f} ms{ratio}"

    return _of_saves(figures, cell)


def _stall_ranges(figures: Figures) -> str:
    return _of_saves(figures, lambda found: "" if found["ratio"] == 1 else f"x{found['low']:.2f}-{found['high']:.2f}")


def _memory(figures: Figures) -> str:
    rows = [
        [size, *(f"x{of['peak_bytes'] / found['bytes']:.2f}" for of in found["variants"].values())]
        for size, found in figures["save"]["cases"].items()
    ]
    return table(["state", *_variants(figures)], rows)


def _of_saves(figures: Figures, cell: Callable[[Figures], str]) -> str:
    cases = figures["save"]["cases"]
    rows = [[size, *(cell(of) for of in found["variants"].values())] for size, found in cases.items()]
    targets = next(iter(cases.values()))["variants"].values()
    most = ["" if of["target"] is None else f"x{of['target']:.2f}" for of in targets]
    return table(["state", *_variants(figures)], [*rows, ["at most", *most]])


def _variants(figures: Figures) -> list[str]:
    return [f"`{name}`" for name in next(iter(figures["save"]["cases"].values()))["variants"]]


TABLES: dict[str, Callable[[Figures], str]] = {
    "machine": _machine,
    "overhead": _overhead,
    "calls": _calls,
    "saves": _saves,
    "resume": _resume,
    "start": _start,
    "incremental": _incremental,
    "stalls": _stalls,
    "ranges": _stall_ranges,
    "memory": _memory,
    "samplers": _samplers,
    "size": _size,
    "growth": _growth,
    "goodput": _goodput,
    "ledger": _ledger,
    "ranks": _ranks,
    "gather": _gather,
    "exchange": _exchange,
    "pieces": _pieces,
    **report_streaming.TABLES,
}
_WORST = "each with its own seed"
PARTS = ("overhead", "ranks", "gather", "ledger", "parts", "resume", "start", "save", "incremental", "size")


def draw(path: Path, figures: Figures) -> None:
    """Write the plot of the ratios: ours, an empty callback's, Lightning 1.9's, and the allowed maximum."""
    import matplotlib  # not needed for the tables

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = figures["overhead"]["cases"]
    pyplot.rcParams.update({"svg.hashsalt": "performance", "svg.fonttype": "none", "font.family": "sans-serif"})
    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(cases) + 1.4), layout="constrained")
    for row, (name, found) in enumerate(cases.items()):
        ours = found["with"]
        axes.plot([ours["low"], ours["high"]], [row, row], color=_BLUE, linewidth=2.5)
        first = {"label": "FaultTolerance, 90 %"} if row == 0 else {}
        axes.plot(ours["ratio"], row, "o", color=_BLUE, markersize=7, **first)
        axes.plot(
            found["empty"]["ratio"], row, "|", color=_GREY, markersize=12, label=None if row else "empty callback"
        )
        if found["target"] is not None:
            axes.plot(found["target"], row, "|", color=_RED, markersize=16, label=None if row else "at most")
        if name in LIGHTNING_19:
            axes.plot(LIGHTNING_19[name], row, "x", color=_GREY, markersize=7, label=None if row else "Lightning 1.9.5")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(cases)), list(cases))
    axes.invert_yaxis()
    axes.set_xlabel("time of a step, relative to no callback")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=4, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
