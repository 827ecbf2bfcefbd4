"""``report``: the history of a run as text, JSON or a page, with its processes and its use of time.

The wording of a report (times, places, ends), shared by its text and its page.

The command ``report``: find the run, and print its report in the requested form, by default as text.

The text fits 80 columns.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lightning_faulttolerant.cli.found import find_meant
from lightning_faulttolerant.cli.histories import FoundRun, runs_beside, runs_of
from lightning_faulttolerant.cli.report_page import (
    end_text,
    page,
    place_text,
    repeated_texts,
    short_duration,
    skipped_texts,
    slow_texts,
    unsaved_text,
    validation_text,
    who_waited,
)
from lightning_faulttolerant.cli.report_pictures import KIND_NAMES, FamilyRun, parent_of, tree_lines
from lightning_faulttolerant.cli.text import moment_text, plural, safe, size_text, table
from lightning_faulttolerant.records.accounting import report_of
from lightning_faulttolerant.records.goodput import KINDS, SAVING, TRAINING, ChapterReport, RunReport
from lightning_faulttolerant.records.history import Autosave, Chapter, FitHistory


def from_text(fit: FitHistory) -> str:
    """Return the place where a fit continued, or "start" if it began from the beginning.

    Args:
        fit: Any fit.
    """
    if fit.started is None:
        return "-"
    return "start" if fit.resumed is None else place_text(fit.place, in_evaluation=fit.is_evaluation)


_WIDTH = 80
_BAR_WIDTH = 24
_MAX_END = 19
_MIN_END = 8
_MAX_TEXTS = 5
_MAX_ROWS = 40
_NUM_FIRST_ROWS = 5
_RIGHT = ("#", "FIT", "LASTED", "FROM", "TO", "SAVES")


def report_lines(report: RunReport) -> Iterator[str]:
    """Return a report, line by line.

    Args:
        report: Report of one run.
    """
    yield f"Run {report.run_id}"
    yield report.path
    if report.num_forgotten:
        yield from _wrapped(
            f"The history was shortened: nothing is known of the first {report.num_forgotten} processes."
        )
    if report.num_unread:
        yield from _wrapped(
            f"{plural(report.num_unread, 'line')} of the history could not be read, torn by a kill or damaged. Their "
            "contents are missing below."
        )
    hidden = report.num_chapters - len(report.chapters)
    for chapter in report.chapters:
        yield ""
        if report.num_chapters > 1:
            more = f" (--all shows the {plural(hidden, 'chapter')} before it)" if hidden else ""
            yield f"Chapter {chapter.number} of {report.num_chapters}{more}"
        yield from _chapter_lines(chapter, report.made, is_last=chapter.number == report.num_chapters)


def _chapter_lines(report: ChapterReport, made: float, *, is_last: bool) -> Iterator[str]:
    chapter = report.chapter
    yield from _processes(chapter, made, is_last=is_last)
    yield ""
    yield from _account(report)
    yield ""
    yield from _autosaves(chapter)
    runs = [run for fit in chapter.fits for run in fit.validations]
    yield from _wrapped(validation_text(runs)) if runs else ()
    yield from _first_of([*repeated_texts(chapter)], "about repeated batches")
    ranks = list(dict.fromkeys(fit.num_ranks for fit in chapter.fits if fit.num_ranks is not None))
    if ranks and ranks != [1]:
        yield f"Ranks: {', then '.join(map(str, ranks))}."
    yield from _first_of(slow_texts(chapter.fits), "about slow ranks")
    processes = enumerate(chapter.processes, start=1)
    fits = [(f"Process {number}", fit) for number, process in processes for fit in process.fits]
    for name, fit in fits:
        if fit.resumed is not None and fit.resumed.not_exact:
            yield from _wrapped(f"{name} did NOT continue exactly: {'; '.join(fit.resumed.not_exact)}")
    for text in skipped_texts(chapter):
        yield from _wrapped(text)
    for name, fit in fits:
        for unsaved in fit.unsaved:
            yield from _wrapped(f"{name} {unsaved_text(unsaved, fit)}")
    for name, fit in fits:
        for text in fit.incidents:
            yield from _wrapped(f"{name} {text}")
    for name, fit in fits:
        if fit.text and not fit.by:
            yield from _wrapped(f"{name}: {fit.text}")
    notes = dict.fromkeys(note for _, fit in fits if fit.resumed is not None for note in fit.resumed.notes)
    yield from _first_of([f"Note: {note}" for note in notes], "of notes")


def _first_of(texts: Sequence[str], about: str) -> Iterator[str]:
    for text in texts[:_MAX_TEXTS]:
        yield from _wrapped(text)
    if len(texts) > _MAX_TEXTS:
        yield f"{plural(len(texts) - _MAX_TEXTS, 'more line')} {about}: --json shows all."


def _processes(chapter: Chapter, made: float, *, is_last: bool) -> Iterator[str]:
    fits = [
        (number, index, fit)
        for number, process in enumerate(chapter.processes, start=1)
        for index, fit in enumerate(process.fits)
    ]
    has_evaluations = any(fit.is_evaluation for _, _, fit in fits)
    has_several = any(fit.number > 1 for _, _, fit in fits) or has_evaluations
    column = "FUNCTION" if has_evaluations else "FIT"
    header = ["#", *([column] if has_several else []), "STARTED", "LASTED", "FROM", "TO", "SAVES", "ENDED"]
    rows = []
    for number, index, fit in fits:
        began = chapter.processes[number - 1].began if index == 0 else fit.began
        last = is_last and fit is fits[-1][2] and chapter.done is None
        end = fit.by or end_text(fit, is_last=last, made=made)
        rows.append(
            [
                str(number),
                *([fit.name if has_evaluations else str(fit.number)] if has_several else []),
                moment_text(began),
                short_duration(fit.last_seen - began),
                from_text(fit),
                "end" if fit.is_finished else place_text(fit.last_place, in_evaluation=fit.is_evaluation),
                str(fit.num_autosaves),
                end,
            ]
        )
    rest = (max(len(row[column]) for row in (header, *rows)) + len("  ") for column in range(len(header) - 1))
    room = min(max(_WIDTH - sum(rest), _MIN_END), _MAX_END)
    rows = [[*row, end if len(end) <= room else f"{end[: room - 3]}..."] for *row, end in rows]
    lines = table(header, rows, right=_RIGHT)
    if len(rows) > _MAX_ROWS:
        left_out = len(rows) - _MAX_ROWS
        first = 1 + _NUM_FIRST_ROWS
        lines[first : first + left_out] = [f"... {left_out} more, --json shows all ..."]
    yield from lines
    yield from _wrapped(f"FROM and TO are epoch:batch, both from 0.{_more_about_places([fit for _, _, fit in fits])}")


def _more_about_places(fits: Sequence[FitHistory]) -> str:
    shown = [place for fit in fits if not fit.is_evaluation for place in (fit.place, fit.last_place)]
    is_inside = any(place is not None and place.num_validated is not None for place in shown)
    more = " A third number is the batch of a validation run." if is_inside else ""
    return f"{more} In evaluations, they are batches." if any(fit.is_evaluation for fit in fits) else more


def _account(report: ChapterReport) -> Iterator[str]:
    account = report.account
    always = (SAVING,) if account.evaluation else (TRAINING, SAVING)
    shown = [kind for kind in KINDS if kind in always or getattr(account, kind) > 0]
    width = max(len(KIND_NAMES[kind]) for kind in shown)
    yield f"Where {short_duration(account.total)} went"
    for kind in shown:
        seconds = getattr(account, kind)
        share = seconds / account.total if account.total > 0 else 0.0
        bar = "#" * round(share * _BAR_WIDTH)
        yield f"  {KIND_NAMES[kind].ljust(width)}  {short_duration(seconds):>7}  {share:6.1%}  {bar}".rstrip()
    up = f" ({account.goodput_while_up:.1%} while there was a process)" if account.down else ""
    yield f"Goodput {account.goodput:.1%}{up}; lost to faults {short_duration(account.lost)}."


def _autosaves(chapter: Chapter) -> Iterator[str]:
    found = [(fit, autosave) for fit in chapter.fits for autosave in fit.autosaves]
    autosaves = [autosave for _, autosave in found]
    if not autosaves:
        yield "No autosave was written."
        return
    slowest = max(found, key=lambda each: each[1].longest)
    num_bytes = sum(autosave.num_bytes or 0 for autosave in autosaves)
    number = sum(autosave.number for autosave in autosaves)
    yield from _wrapped(
        f"{plural(number, 'autosave')}, {size_text(num_bytes)} in all. {who_waited(chapter.fits)} waited longest"
        f" for {_which(*slowest)}: {short_duration(slowest[1].longest)}."
    )


def _which(fit: FitHistory, autosave: Autosave) -> str:
    place = autosave.place
    if place is None:
        which = "one whose place is not known"
    elif fit.is_evaluation:
        which = f"the one of {fit.name}, batch {place.num_validated or 0}"
    else:
        inside = "" if place.num_validated is None else f", validation batch {place.num_validated}"
        which = f"the one of epoch {place.epoch}, batch {place.batch}{inside}"
    size = "" if autosave.num_bytes is None or autosave.number > 1 else f" ({size_text(autosave.num_bytes)})"
    return f"{which}{size}"


def _wrapped(text: str) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


DESCRIPTION = """\
Report on a run: its processes, when each began, where it continued, and why it ended; its autosaves; and where the time
went: training and evaluation that counted, waiting for autosaves, restoring, repeated work, and the time without a
process. A script with several fits or evaluations has a line for each. The report says how many batches ran again.

DIR is the name or the directory of a run (<dirpath>/<run_id>), a checkpoint of it, any directory above, or a URL. Of
several runs, the one that was alive last is reported, and the others are listed. The report reads history.jsonl in the
directory of the run, which stays when the run is over.
"""
EPILOG = """\
A run that is started again after its end begins a new chapter. The last chapter is shown; --all shows all of
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
    parser.add_argument(
        "directory", metavar="DIR", nargs="?", help="run, directory, or URL; by default the runs of this directory"
    )
    parser.add_argument("--all", action="store_true", help="show all chapters, not only the last")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--html", metavar="FILE", help="also write it as one self-contained HTML file")


def run(arguments: argparse.Namespace) -> int:
    """Print the report.

    Args:
        arguments: The parsed arguments.

    Returns:
        The exit status.
    """
    what = find_meant(arguments.directory)
    what.print_problems()
    runs = runs_of(what)
    if not runs:
        print(safe(f"No history of a run was found in {what.path}{what.why_nothing}."), file=sys.stderr)
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
    for line in [*report_lines(report), *(["", *tree] if tree else ())]:
        print(safe(line))
    if others:
        _print_others(others)
    return 0


def _family(run: FoundRun, others: list[FoundRun]) -> dict[str, FamilyRun]:
    """Return what is known of the runs in the same place, by id."""
    found = {one.run_id: one for one in (*(others or runs_beside(run)), run)}
    return {
        name: FamilyRun(run_id=name, parent=parent_of(one.history), reason=_reason(one)) for name, one in found.items()
    }


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
    }


def _print_others(others: list[FoundRun]) -> None:
    print(f"\nOther runs there: {len(others)}")
    rows = [[run.run_id, moment_text(run.last_seen), str(len(run.history.chapters))] for run in others]
    for line in table(("RUN", "LAST SEEN", "CHAPTERS"), rows, right=("CHAPTERS",), indent=2):
        print(line)
