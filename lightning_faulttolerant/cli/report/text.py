"""A report as plain text that fits 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lightning_faulttolerant.cli.report.words import (
    KIND_NAMES,
    duration_text,
    end_text,
    from_text,
    place_text,
    unsaved_text,
)
from lightning_faulttolerant.cli.text import moment_text, safe, size_text, table
from lightning_faulttolerant.records.goodput import KINDS, SAVING, TRAINING, ChapterReport, RunReport
from lightning_faulttolerant.records.history import Autosave, Chapter, FitHistory

_WIDTH = 80
_BAR_WIDTH = 24
_MAX_END = 19
_MAX_ROWS = 40
_NUM_FIRST_ROWS = 5
_RIGHT = ("#", "FIT", "LASTED", "FROM", "TO", "SAVES")


def report_lines(report: RunReport) -> Iterator[str]:
    """Return a report, line by line.

    Args:
        report: Report of one run.
    """
    yield f"Run {safe(report.run_id)}"
    yield safe(report.path)
    if report.num_forgotten:
        yield from _wrapped(
            f"Of the first {report.num_forgotten} processes nothing is known any more: the history was shortened."
        )
    if report.num_unread:
        yield from _wrapped(
            f"{_count(report.num_unread, 'line')} of the history could not be read, torn by a kill or damaged: what"
            " they told is missing below."
        )
    hidden = report.num_chapters - len(report.chapters)
    for chapter in report.chapters:
        yield ""
        if report.num_chapters > 1:
            more = f" (--all shows the {_count(hidden, 'chapter')} before it)" if hidden else ""
            yield f"Chapter {chapter.number} of {report.num_chapters}{more}"
        yield from _chapter_lines(chapter, report.made, is_last=chapter.number == report.num_chapters)


def _chapter_lines(report: ChapterReport, made: float, *, is_last: bool) -> Iterator[str]:
    chapter = report.chapter
    yield from _processes(chapter, made, is_last=is_last)
    yield ""
    yield from _account(report)
    yield ""
    yield from _autosaves(chapter)
    ranks = list(dict.fromkeys(fit.num_ranks for fit in chapter.fits if fit.num_ranks is not None))
    if ranks and ranks != [1]:
        yield f"Ranks: {', then '.join(map(str, ranks))}."
    for number, process in enumerate(chapter.processes, start=1):
        for fit in process.fits:
            if fit.resumed is not None and fit.resumed.not_exact:
                yield from _wrapped(f"Process {number} did NOT continue exactly: {'; '.join(fit.resumed.not_exact)}")
    for number, process in enumerate(chapter.processes, start=1):
        for fit in process.fits:
            for unsaved in fit.unsaved:
                yield from _wrapped(f"Process {number} {unsaved_text(unsaved, fit)}")
    for number, process in enumerate(chapter.processes, start=1):
        for fit in process.fits:
            if fit.text and not (fit.reason or "").startswith("stopped by "):
                yield from _wrapped(f"Process {number}: {fit.text}")


def _processes(chapter: Chapter, made: float, *, is_last: bool) -> Iterator[str]:
    fits = [
        (number, index, fit)
        for number, process in enumerate(chapter.processes, start=1)
        for index, fit in enumerate(process.fits)
    ]
    has_several = any(fit.number > 1 for _, _, fit in fits)
    header = ["#", *(["FIT"] if has_several else []), "STARTED", "LASTED", "FROM", "TO", "SAVES", "ENDED"]
    rows = []
    for number, index, fit in fits:
        began = chapter.processes[number - 1].began if index == 0 else fit.began
        last = is_last and fit is fits[-1][2] and chapter.done is None
        end = safe(end_text(fit, is_last=last, made=made))
        rows.append(
            [
                str(number),
                *([str(fit.number)] if has_several else []),
                moment_text(began),
                duration_text(fit.last_seen - began),
                from_text(fit),
                _to_text(fit),
                str(fit.num_autosaves),
                end if len(end) <= _MAX_END else f"{end[: _MAX_END - 3]}...",
            ]
        )
    lines = table(header, rows, right=_RIGHT)
    if len(rows) > _MAX_ROWS:
        left_out = len(rows) - _MAX_ROWS
        first = 1 + _NUM_FIRST_ROWS
        lines[first : first + left_out] = [f"... {left_out} more, --json tells all ..."]
    yield from lines
    yield "FROM and TO are epoch:batch, both from 0."


def _to_text(fit: FitHistory) -> str:
    return "end" if fit.is_finished else place_text(fit.last_place)


def _account(report: ChapterReport) -> Iterator[str]:
    account = report.account
    shown = [kind for kind in KINDS if kind in (TRAINING, SAVING) or getattr(account, kind) > 0]
    width = max(len(KIND_NAMES[kind]) for kind in shown)
    yield f"Where {duration_text(account.total)} went"
    for kind in shown:
        seconds = getattr(account, kind)
        share = seconds / account.total if account.total > 0 else 0.0
        bar = "#" * round(share * _BAR_WIDTH)
        yield f"  {KIND_NAMES[kind].ljust(width)}  {duration_text(seconds):>7}  {share:6.1%}  {bar}".rstrip()
    up = f" ({account.goodput_while_up:.1%} while there was a process)" if account.down else ""
    yield f"Goodput {account.goodput:.1%}{up}; lost to faults {duration_text(account.lost)}."


def _autosaves(chapter: Chapter) -> Iterator[str]:
    autosaves = [autosave for fit in chapter.fits for autosave in fit.autosaves]
    if not autosaves:
        yield "No autosave was written."
        return
    slowest = max(autosaves, key=lambda autosave: autosave.longest)
    num_bytes = sum(autosave.num_bytes or 0 for autosave in autosaves)
    number = sum(autosave.number for autosave in autosaves)
    yield from _wrapped(
        f"{_count(number, 'autosave')}, {size_text(num_bytes)} in all. Training waited longest for"
        f" {_which(slowest)}: {duration_text(slowest.longest)}."
    )


def _which(autosave: Autosave) -> str:
    place = autosave.place
    which = "one whose place is not known" if place is None else f"the one of epoch {place.epoch}, batch {place.batch}"
    size = "" if autosave.num_bytes is None or autosave.number > 1 else f" ({size_text(autosave.num_bytes)})"
    return f"{which}{size}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _wrapped(text: str) -> list[str]:
    text = safe(" ".join(text.split()))
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
