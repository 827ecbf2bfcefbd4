"""The command ``report``: find the run, and print its report in the requested form.

The histories may be in a directory or below a URL.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_faulttolerant.cli.report.page import page
from lightning_faulttolerant.cli.report.text import report_lines
from lightning_faulttolerant.cli.report.tree import FamilyRun, parent_of, tree_lines
from lightning_faulttolerant.cli.report.words import end_text
from lightning_faulttolerant.cli.text import moment_text, remote_errors, safe, table
from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.chapters import history_of
from lightning_faulttolerant.records.goodput import ChapterReport, RunReport
from lightning_faulttolerant.records.history import DEFAULT_FOLDER, FILE_NAME, RunHistory
from lightning_faulttolerant.records.lines import count_lines, parse_lines
from lightning_faulttolerant.storage.store import is_url, local_path, open_file, open_store, split_path

DESCRIPTION = """\
Report on a run: its processes, when each began, where it continued, and why it ended; its autosaves; and where the time
went: training and evaluation that counted, waiting for autosaves, restoring, work that was done again, no process at
all. A script with several fits or evaluations has a line for each. The report names each validation run or evaluation
that a later process continued, with the batches that ran again.

DIR is the directory of a run (<dirpath>/<run_id>), a dirpath with several runs, the default_root_dir above it, or a URL
of one of these. If it has several runs, the one that was alive last is reported, and the others are listed. The report
reads history.jsonl in the directory of the run, which stays when the run is over.
"""
EPILOG = """\
If a run is started again after it was over, it begins a new chapter. The last chapter is shown; --all shows all of
them. The time of a kill is known to ten seconds (with a URL, to a minute), from the last autosave or sign of life.
"may be running": the last sign of life is at most 90 seconds old. Goodput is the share of the wall time in which
training or evaluation made lasting progress.

Exit status: 0 reported, 1 no history exists, 2 something could not be read or written.
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
        print(f"No history of a run was found in {safe(arguments.directory)}.", file=sys.stderr)
        return 1
    newest, *others = runs
    report = report_of(newest.history, run_id=newest.run_id, path=newest.path, made=time.time(), is_whole=arguments.all)
    assert report is not None
    tree = list(tree_lines(newest.run_id, _family(newest, others)))
    if arguments.html is not None:
        Path(arguments.html).write_text(page(report, tree), encoding="utf-8")
    if arguments.json:
        print(json.dumps({**as_json(report, others), "tree": tree}, indent=2))
        return 0
    for line in report_lines(report):
        print(line)
    for line in ["", *tree] if tree else ():
        print(safe(line))
    _print_others(others)
    return 0


def _family(run: FoundRun, others: list[FoundRun]) -> dict[str, FamilyRun]:
    """Return what is known of the runs in the same place, by id."""
    beside = others or _beside(run.path)
    found = {one.run_id: one for one in (*beside, run)}
    return {
        name: FamilyRun(run_id=name, parent=parent_of(one.history), reason=_reason(one)) for name, one in found.items()
    }


def _beside(path: str) -> list[FoundRun]:
    """Return the runs in the directory above that of a run."""
    above = split_path(path if is_url(path) else os.path.abspath(local_path(path)))[0]
    try:
        return _below(above)
    except OSError:
        return []


def _reason(run: FoundRun) -> str:
    chapter = run.history.chapters[-1]
    fits = chapter.processes[-1].fits
    if not fits:
        return "begun"
    return end_text(fits[-1], is_last=chapter.done is None, made=time.time())


def as_json(report: RunReport, others: list[FoundRun]) -> dict[str, object]:
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


def _chapter_json(report: ChapterReport) -> dict[str, object]:
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


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundRun:
    """A run that has a history.

    Args:
        run_id: Its id, which is the name of its directory.
        path: The path or URL of that directory.
        history: The history of the run.
    """

    run_id: str
    path: str
    history: RunHistory

    @property
    def last_seen(self) -> float:
        """Time of the last known event of the run, seconds since 1970."""
        last = self.history.chapters[-1]
        return last.processes[-1].last_seen if last.done is None else last.done


def find_runs(directory: str) -> list[FoundRun]:
    """Return the runs that have a history, the most recently active first.

    Args:
        directory: Directory of a run, a ``dirpath`` with several runs, or the ``default_root_dir`` above it; or a URL
            of one of them.

    Raises:
        FileNotFoundError: If the local directory does not exist.
        OSError: If something can't be read.
    """
    with remote_errors(directory):
        if not is_url(directory):
            os.stat(local_path(directory))
        folder, name = split_path(directory)
        if name == FILE_NAME:
            directory = folder or "."
        own = _run(directory)
        runs = [own] if own is not None else _below(directory)
        if not runs:
            runs = _below(_path(directory, DEFAULT_FOLDER))
    return sorted(runs, key=lambda run: run.last_seen, reverse=True)


def _below(directory: str) -> list[FoundRun]:
    found = (_run(_path(directory, name)) for name in open_store(directory).listing().folders)
    return [run for run in found if run is not None]


def _path(directory: str, name: str) -> str:
    """Return the path of a folder in the form that the user would write."""
    return open_store(directory).path(name) if is_url(directory) else os.path.join(local_path(directory), name)


def _run(directory: str) -> FoundRun | None:
    store = open_store(directory)
    if not is_url(directory) and not os.path.isfile(store.path(FILE_NAME)):
        return None
    try:
        with open_file(store.path(FILE_NAME), whole=True) as file:
            text = file.read()
    except FileNotFoundError:
        return None
    lines = parse_lines(text)
    history = history_of(lines, num_unread=count_lines(text) - len(lines))
    if not history.chapters:
        return None
    return FoundRun(run_id=split_path(store.url)[1], path=directory, history=history)
