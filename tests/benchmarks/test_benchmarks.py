"""The benchmarks run and give figures; how large these are depends on the machine and is asserted nowhere."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    all as benchmarks,
    gather,
    goodput,
    growth,
    incremental,
    ledger,
    order,
    overhead,
    parts,
    report,
    report_streaming,
    resume,
    samplers,
    save,
    shuffles,
    size,
    start,
    streaming,
)
from benchmarks.libraries import LIBRARIES

FAST = ("overhead", "save", "order")
# The arguments of each benchmark, and names of what it has to have measured.
BENCHMARKS: dict[str, tuple[Any, list[str], set[str]]] = {
    "overhead": (overhead, ["--case", "metrics"], {"step_us", "empty", "with", "with, all steps"}),
    "overhead with workers": (overhead, ["--case", "iterable, 2 workers"], {"step_us", "with"}),
    "overhead of two ranks": (overhead, ["--ranks", "2", "--case", "plain"], {"step_us", "with"}),
    "ledger": (ledger, ["--case", "BoringModel"], {"step_us", "ratio"}),
    "gather": (gather, [], {"part_bytes", "network_s", "join_s", "check_s", "write_s", "save_s"}),
    "goodput": (goodput, [], {"ours", "others", "goodput"}),
    "parts": (parts, [], {"calls_us", "saves"}),
    "incremental": (incremental, [], {incremental.LIGHTNINGS, incremental.INCREMENTAL, "ratio"}),
    "start": (start, [], set(start.VARIANTS)),
    "save": (save, ["--size", "10 MB"], {*save.VARIANTS, "stall_s", "on_disk_s", "peak_bytes"}),
    "samplers": (samplers, ["--gigabytes", "0.001"], {*samplers.SAMPLERS, "seek_s", "index_ns"}),
    "growth": (growth, ["--case", "no workers"], {"without", "ours"}),
    "order": (order, [], {"ours", "mosaic", "s", "bytes"}),
}


def parts_of(figures: Any) -> Iterator[dict[str, Any]]:
    """Yield each object in the figures, from the outside in."""
    if isinstance(figures, dict):
        yield figures
    for part in figures.values() if isinstance(figures, dict) else figures if isinstance(figures, list) else ():
        yield from parts_of(part)


def figures_of(module: Any, arguments: list[str], directory: Path) -> Any:
    """Run a benchmark and return what it has written, in which each ratio is within its range."""
    module.main([*arguments, "--quick", "--output", str(directory / "figures.json")])
    figures = json.loads((directory / "figures.json").read_text())
    for part in parts_of(figures):
        if isinstance(part.get("ratio"), float) and "low" in part:
            assert 0 < part["low"] <= part["ratio"] <= part["high"]
    return figures


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST)) for name in BENCHMARKS]
)
def test_each_benchmark_gives_its_figures(name: str, tmp_path: Path) -> None:
    """All that is compared has a figure, and each ratio is within its range."""
    module, arguments, names = BENCHMARKS[name]
    figures = figures_of(module, arguments, tmp_path)
    assert names <= {each for part in parts_of(figures) for each in part}


@pytest.mark.slow
def test_streaming_libraries_are_measured_in_one_run(tmp_path: Path) -> None:
    """Each case has a figure of each library, and the figures fill the tables of the page."""
    both = {"streaming": figures_of(streaming, ["--data", "small"], tmp_path), "order": figures_of(order, [], tmp_path)}
    cases = both["streaming"]["cases"]["small"]
    for case in (*cases["speed"], *cases["warm"], *cases["cold"]):
        assert set(case["medians"]) == set(LIBRARIES)
    assert all(table(both) for table in report_streaming.TABLES.values())


@pytest.mark.parametrize("torchdata", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_resumed_fit_begins_where_it_was_cut(tmp_path: Path, torchdata: bool) -> None:
    """Fresh and resumed fits come to their first step, also with torchdata's loader."""
    options = {"num_samples": 2000, "at": 0.9, "rounds": 1, "directory": tmp_path, "torchdata": torchdata}
    found = resume.measure("RandomSampler", 0, **options)
    assert found["ratio"] == pytest.approx(found["resumed_s"] / found["fresh_s"])
    assert not torchdata or found[resume.TORCHDATA]["resumed_s"] > 0


def test_failures_come_at_the_same_times_for_both_sides() -> None:
    """The times depend on the seed only, and their mean distance is the one that is asked for."""
    one, other, another = (list(islice(goodput.failures(60.0, seed), 4000)) for seed in (1, 1, 2))
    assert one == other != another
    assert one == sorted(one)
    assert one[-1] / 4000 == pytest.approx(60.0, rel=0.1)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_our_part_of_an_autosave_is_small(num_workers: int, tmp_path: Path) -> None:
    """With all global generators drawn from, in every process, it is at most 20 kB and 15 kB a worker."""
    found = size.measure(num_workers, steps=200, directory=tmp_path)
    assert 0 < found["bytes"] <= 20_000 + 15_000 * num_workers


def test_page_of_the_shuffles_holds_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders are the same on every machine, and so is the table."""
    monkeypatch.setattr(shuffles, "NUM_EPOCHS", 1)
    page = (benchmarks.DOCS / "shuffles.md").read_text(encoding="utf-8")
    for case in shuffles.CASES[:4]:
        row = shuffles.table({case.name: shuffles.measure(case)}).splitlines()[-1]
        assert row.rpartition(" | ")[0] in page


def test_report_is_made_again(tmp_path: Path) -> None:
    """The figures beside the page give its tables; others give other tables, all else stays, and a plot is drawn."""
    for name in ("performance.md", "performance.json"):
        shutil.copy(benchmarks.DOCS / name, tmp_path)
    page = (tmp_path / "performance.md").read_text()
    figures = json.loads((tmp_path / "performance.json").read_text())
    assert set(re.findall(r"<!-- (\w+) -->", page)) == {*report.TABLES, "end"}
    assert report.filled(page, figures) == page
    for part in ("overhead", "ranks"):
        figures[part]["cases"] = {"plain": {**figures[part]["cases"]["plain"], "step_us": 123456.0}}
    (tmp_path / "performance.json").write_text(json.dumps(figures))
    benchmarks.main(["--report", "--directory", str(tmp_path)])
    page = (tmp_path / "performance.md").read_text()
    assert "| plain | 123456 µs |" in page
    assert "| shuffled |" not in page
    assert page.startswith("# Performance")
    assert (tmp_path / "performance.svg").read_text().rstrip().endswith("</svg>")
