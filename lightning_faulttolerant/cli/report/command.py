"""The command ``report``: find the run, and print its report in the requested form."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lightning_faulttolerant.cli.report.histories import FoundRun, find_runs
from lightning_faulttolerant.cli.report.page import page
from lightning_faulttolerant.cli.report.text import report_lines
from lightning_faulttolerant.cli.text import moment_text, safe, table
from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.goodput import ChapterReport, RunReport

DESCRIPTION = """\
Report on a run: its processes, when each began, where it continued and why it ended; its autosaves; and where the time
has gone: training and evaluation that counted, waiting for autosaves, restoring, work that was done again, no process
at all. Scripts with several fits, or with evaluations, have a line for each, and each validation run or evaluation that
a later process continued is named, with the batches that ran again.

DIR is a run's directory (<dirpath>/<run_id>), or a dirpath with several: the run that was alive last is reported, the
others are listed. Also the default_root_dir above it, or a URL of one of them. What is read is the run's history.jsonl,
which stays when the run is over.
"""
EPILOG = """\
A run that is started again when it was over begins a new chapter; the last is shown, --all shows all of them. When a
process was killed is known to ten seconds (a minute below a URL): by its last autosave or sign of life. "may be
running": the last one is not older than 90 seconds. Goodput is the share of the wall time in which training or
evaluation made lasting progress.

Exit status: 0 reported, 1 there is no history there, 2 something could not be read or written.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``report``.

    Args:
        parser: The parser of this command.
    """
    parser.add_argument("directory", metavar="DIR", help="directory or URL")
    parser.add_argument("--all", action="store_true", help="show all chapters, not only the last")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="also write it as a page: one file, which asks for no other")


def run(arguments: argparse.Namespace) -> int:
    """Print the report.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    runs = find_runs(arguments.directory)
    if not runs:
        print(f"There is no history of a run in {safe(arguments.directory)}.", file=sys.stderr)
        return 1
    newest, *others = runs
    report = report_of(newest.history, run_id=newest.run_id, path=newest.path, made=time.time(), is_whole=arguments.all)
    assert report is not None
    if arguments.html is not None:
        Path(arguments.html).write_text(page(report), encoding="utf-8")
    if arguments.json:
        print(json.dumps(as_json(report, others), indent=2))
        return 0
    for line in report_lines(report):
        print(line)
    _print_others(others)
    return 0


def as_json(report: RunReport, others: list[FoundRun]) -> dict[str, Any]:
    """Return a report as plain values. Times are seconds since 1970; durations are seconds.

    Args:
        report: Report of one run.
        others: Other runs in the same directory.
    """
    return {
        "run_id": report.run_id,
        "path": report.path,
        "made": report.made,
        "num_chapters": report.num_chapters,
        "num_forgotten": report.num_forgotten,
        "num_unread": report.num_unread,
        "chapters": [_chapter_json(chapter) for chapter in report.chapters],
        "other_runs": [other.run_id for other in others],
    }


def _chapter_json(report: ChapterReport) -> dict[str, Any]:
    account = report.account
    sums = {
        "total": account.total,
        "lost": account.lost,
        "goodput": account.goodput,
        "goodput_while_up": account.goodput_while_up,
    }
    return {
        "number": report.number,
        **asdict(report.chapter),
        "account": {**asdict(account), **sums},
        "segments": [asdict(segment) for segment in report.segments],
        "continued": [asdict(continued) for continued in report.continued],
    }


def _print_others(others: list[FoundRun]) -> None:
    if not others:
        return
    print(f"\nOther runs there: {len(others)}")
    rows = [[run.run_id, moment_text(run.last_seen), str(len(run.history.chapters))] for run in others]
    for line in table(("RUN", "LAST SEEN", "CHAPTERS"), rows, right=("CHAPTERS",), indent=2):
        print(line)
