"""The benchmarks run and give figures; how large these are depends on the machine and is asserted nowhere."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    all as benchmarks,
    gather,
    goodput,
    growth,
    incremental,
    ledger,
    overhead,
    parts,
    report,
    resume,
    runs,
    samplers,
    save,
    start,
)
from benchmarks.ranks import in_ranks


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    """Put back what a benchmark sets for its whole process: torch's threads, and how much is logged."""
    num_threads = torch.get_num_threads()
    loggers = [logging.getLogger(name) for name in runs.LOGGERS]
    levels = [logger.level for logger in loggers]
    yield
    torch.set_num_threads(num_threads)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def figures_of(main: Any, arguments: list[str], directory: Path) -> Any:
    """Run a benchmark and return what it has written."""
    main([*arguments, "--quick", "--output", str(directory / "figures.json")])
    return json.loads((directory / "figures.json").read_text())


@pytest.mark.parametrize("case", ["metrics", pytest.param("iterable, 2 workers", marks=pytest.mark.slow)])
def test_overhead_gives_a_ratio_within_its_range(case: str, tmp_path: Path) -> None:
    """A case gives a step's time and the ratios to it, of an empty callback too."""
    figures = figures_of(overhead.main, ["--case", case], tmp_path)
    [(name, found)] = figures["cases"].items()
    assert name == case
    assert found["step_us"] > 10
    for variant in ("empty", "with", "with, all steps"):
        assert 0 < found[variant]["low"] <= found[variant]["ratio"] <= found[variant]["high"]


@pytest.mark.slow
def test_overhead_of_two_ranks_is_that_of_their_steps_together(tmp_path: Path) -> None:
    """Both ranks fit all variants in one order, and rank 0 tells what its steps took."""
    figures = figures_of(overhead.main, ["--ranks", "2", "--case", "plain"], tmp_path)
    [found] = figures["cases"].values()
    assert found["ranks"] == 2
    assert 0 < found["with"]["low"] <= found["with"]["ratio"] <= found["with"]["high"]


@pytest.mark.slow
def test_ledger_gives_a_ratio_within_its_range(tmp_path: Path) -> None:
    """A case gives a step's time, what a ledger adds to it, and their ratio."""
    figures = figures_of(ledger.main, ["--case", "BoringModel"], tmp_path)
    [found] = figures["cases"].values()
    assert found["step_us"] > 10
    assert 0 < found["low"] <= found["ratio"] <= found["high"]


@pytest.mark.slow
def test_gathering_takes_what_its_pieces_take(tmp_path: Path) -> None:
    """Our part grows with the ranks, all pieces were timed, and a save is the sum of its pieces."""
    figures = figures_of(gather.main, [], tmp_path)
    for case in figures["cases"].values():
        few, many = case["ranks"].values()
        assert 0 < 4 * few["part_bytes"] < many["part_bytes"]
        assert all(seconds > 0 for seconds in many.values())
        pieces = (many[f"{key}_s"] for key in ("network", "join", "check", "write"))
        assert many["save_s"] == pytest.approx(sum(pieces))
    assert figures["exchanged"]["2"]["descriptors"] == 1  # the other rank


@pytest.mark.slow
def test_goodput_of_a_killed_run_is_measured(tmp_path: Path) -> None:
    """Both sides end although they are killed, and only ours ends with the right result."""
    figures = figures_of(goodput.main, [], tmp_path)
    [found] = figures["cases"].values()
    assert found["ours"]["right"] == 1
    assert 0 < found["ours"]["goodput"] < 1
    assert found["ratio"] == pytest.approx(found["ours"]["goodput"] / found["others"][found["best"]]["goodput"])


def test_failures_come_at_the_same_times_for_both_sides() -> None:
    """The times depend on the seed only, and their mean distance is the one that is asked for."""
    one, other, another = (list(islice(goodput.failures(60.0, seed), 4000)) for seed in (1, 1, 2))
    assert one == other != another
    assert one == sorted(one)
    assert one[-1] / 4000 == pytest.approx(60.0, rel=0.1)


def test_exchange_grows_by_what_each_rank_adds() -> None:
    """The line through points that lie on one has its slope."""
    assert gather.slope({2: 1.0, 4: 2.0, 8: 4.0}) == pytest.approx(0.5)


def test_each_case_makes_as_many_batches_as_steps() -> None:
    """No case is cut short by its loader."""
    for case in overhead.CASES.values():
        loader = case.loader(4)
        if case.num_workers:
            assert loader.num_workers == case.num_workers
            continue
        assert len(list(loader)) == 4


@pytest.mark.slow
def test_parts_are_all_timed(tmp_path: Path) -> None:
    """Each part was called, in the main process and in a worker, and saving took time."""
    figures = figures_of(parts.main, [], tmp_path)
    assert all(microseconds > 0 for microseconds in figures["calls_us"].values())
    assert all(value > 0 for found in figures["saves"].values() for value in found.values())


def test_resumed_fit_begins_where_it_was_cut(tmp_path: Path) -> None:
    """Fresh and resumed fits both come to their first step."""
    found = resume.measure("RandomSampler", 0, num_samples=2000, at=0.9, rounds=1, directory=tmp_path)
    assert found["fresh_s"] > 0
    assert found["ratio"] == pytest.approx(found["resumed_s"] / found["fresh_s"])


@pytest.mark.slow
def test_incremental_autosaves_are_compared(tmp_path: Path) -> None:
    """Both ways have a size and a time, and the ratios are those of Lightning's to ours."""
    found = figures_of(incremental.main, [], tmp_path)
    sizes = found["bytes"]
    assert found["ratio"]["bytes"] == sizes[incremental.LIGHTNINGS] / sizes[incremental.INCREMENTAL] > 2
    assert all(value > 0 for value in found["seconds"].values())


@pytest.mark.slow
def test_resumed_fit_is_compared_with_torchdata(tmp_path: Path) -> None:
    """With torchdata's loader, Lightning resumes at the same batch, which takes time, too."""
    options = {"num_samples": 2000, "at": 0.9, "rounds": 1, "directory": tmp_path, "torchdata": True}
    found = resume.measure("DistributedSampler", 0, **options)
    theirs = found[resume.TORCHDATA]
    assert theirs["ratio"] == pytest.approx(found["resumed_s"] / theirs["resumed_s"])


@pytest.mark.slow
def test_start_of_a_process_is_timed_with_us_and_without(tmp_path: Path) -> None:
    """Each kind of start comes to its step, and each time is compared with that without us."""
    figures = figures_of(start.main, [], tmp_path)
    [found] = figures["cases"].values()
    assert list(found) == list(start.VARIANTS)
    assert found["without"]["ratio"] == 1
    assert found["resumed"]["ratio"] == pytest.approx(found["resumed"]["seconds"] / found["without"]["seconds"])


def test_each_way_to_save_is_timed(tmp_path: Path) -> None:
    """Each has a stall, a time until it is on the disk, a ratio within its range, and the memory that it takes."""
    figures = figures_of(save.main, ["--size", "10 MB"], tmp_path)
    [(size, found)] = figures["cases"].items()
    assert size == "10 MB"
    assert found["bytes"] > 50_000
    assert list(found["variants"]) == list(save.VARIANTS)
    for of in found["variants"].values():
        assert 0 < of["stall_s"] <= of["on_disk_s"]
        assert 0 < of["low"] <= of["ratio"] <= of["high"]
        assert of["peak_bytes"] > 0
    assert found["variants"][save.LIGHTNINGS]["ratio"] == 1


@pytest.mark.slow
def test_samplers_are_measured_as_far_as_they_fit(tmp_path: Path) -> None:
    """Each has a time to its position and for an index, and what it would not have memory for is left out."""
    figures = figures_of(samplers.main, ["--gigabytes", "0.001"], tmp_path)
    small, large = figures["cases"].values()
    assert set(small) == set(large) == set(samplers.SAMPLERS)
    assert large["DistributedSampler"] is None
    for found in (*small.values(), large['order="feistel"']):
        assert found["seek_s"] > 0
        assert found["index_ns"] > 0


@pytest.mark.slow
def test_growth_is_measured_in_its_own_process(tmp_path: Path) -> None:
    """Each run says by how many bytes its process grew, and a process that fails is an error."""
    figures = figures_of(growth.main, ["--case", "no workers"], tmp_path)
    found = figures["cases"]["no workers"]
    assert set(found) == {"without", "ours"}
    assert all(isinstance(num_bytes, int) for num_bytes in found.values())
    with pytest.raises(RuntimeError, match="KeyError: 'no such case'"):
        in_ranks(growth.growth, 1, "no such case", 10, False, tmp_path)


def test_page_is_of_the_figures_beside_it() -> None:
    """The tables of docs/performance.md are those that its figures give."""
    page = (benchmarks.DOCS / "performance.md").read_text()
    figures = json.loads((benchmarks.DOCS / "performance.json").read_text())
    assert set(re.findall(r"<!-- (\w+) -->", page)) == {*report.TABLES, "end"}
    assert report.filled(page, figures) == page


def test_report_is_made_again(tmp_path: Path) -> None:
    """Other figures give other tables, all else on the page stays, and a plot is drawn."""
    for name in ("performance.md", "performance.json"):
        shutil.copy(benchmarks.DOCS / name, tmp_path)
    figures = json.loads((tmp_path / "performance.json").read_text())
    for part in ("overhead", "ranks"):
        figures[part]["cases"] = {"plain": {**figures[part]["cases"]["plain"], "step_us": 123456.0}}
    (tmp_path / "performance.json").write_text(json.dumps(figures))
    benchmarks.main(["--report", "--directory", str(tmp_path)])
    page = (tmp_path / "performance.md").read_text()
    assert "| plain | 123456 µs |" in page
    assert "| shuffled |" not in page
    assert page.startswith("# Performance")
    assert (tmp_path / "performance.svg").read_text().rstrip().endswith("</svg>")
