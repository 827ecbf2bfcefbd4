"""The page of a run: goodput, use of time, progress over the wall time, processes, autosaves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from lightning_faulttolerant.cli.page.html import Child, Markup, document, pairs, stats, table, tag
from lightning_faulttolerant.cli.page.numbers import count_text, duration_text, plural, share_text
from lightning_faulttolerant.cli.report.picture import account_bar, autosave_bars, progress
from lightning_faulttolerant.cli.report.words import (
    RUNNING_SECONDS,
    again_text,
    end_text,
    skipped_texts,
    slow_texts,
    unsaved_text,
    validation_text,
    who_waited,
)
from lightning_faulttolerant.cli.text import moment_text, size_text
from lightning_faulttolerant.records.goodput import EVALUATION, Account, ChapterReport, RunReport
from lightning_faulttolerant.records.history import FINISHED, Autosave, FitHistory, Process, RunPlace

_NUM_NOTES = 40
_NUM_TEXT = 300
_NUM_FIRM = 28


def page(report: RunReport, tree: Sequence[str] = ()) -> str:
    """Return the page of a run, a single file that makes no requests.

    Args:
        report: Report of the run.
        tree: The tree of its branches, as lines of text with a title.
    """
    *earlier, last = report.chapters
    return document(
        f"Run {report.run_id}",
        _head(report, last),
        _chapter(last, report),
        _branches(tree),
        (_earlier(chapter, report) for chapter in reversed(earlier)),
        _surroundings(report, last),
        _foot(),
    )


def _head(report: RunReport, last: ChapterReport) -> Markup:
    over = tag("p", "Run ", tag("b", report.run_id), ", ", _span(last), class_="over")
    return tag("header", over, _headline(last.account), _lead(last), _stats(last), class_="is-goodput")


def _headline(account: Account) -> Markup:
    if not account.useful > 0:
        return tag("h1", "No training yet")
    number, _, unit = share_text(account.goodput).rpartition(" ")
    return tag("h1", number, tag("span", unit, class_="unit"), tag("span", " goodput", class_="beside"))


def _lead(chapter: ChapterReport) -> Markup:
    account = chapter.account
    if not account.useful > 0:
        return tag("p", f"In {duration_text(account.total)}, no batch is known to have been trained.", class_="lead")
    names = [name for name, seconds in (("training", account.training), ("evaluation", account.evaluation)) if seconds]
    text = f"Of {duration_text(account.total)}, {' and '.join(names)} made lasting progress for"
    text += f" {duration_text(account.useful)}."
    if account.down > 0.001 * account.total:
        text += f" Without the time in which there was no process, that is {share_text(account.goodput_while_up)}."
    return tag("p", text, class_="lead")


def _stats(chapter: ChapterReport) -> Markup:
    processes = chapter.chapter.processes
    autosaves = _autosaves(chapter)
    return stats(
        ("process" if len(processes) == 1 else "processes", count_text(len(processes))),
        ("lost to faults", duration_text(chapter.account.lost)),
        ("spent on autosaves", duration_text(chapter.account.saving)),
        ("autosaves", count_text(sum(autosave.number for autosave in autosaves))),
        _work_done(chapter.chapter.fits),
    )


def _work_done(fits: Sequence[FitHistory]) -> tuple[str, str]:
    places = [(fit, fit.last_place) for fit in fits if fit.last_place is not None]
    if places and all(fit.is_evaluation for fit, _ in places):
        most: dict[int, int] = {}
        for fit, place in places:
            most[fit.number] = max(most.get(fit.number, 0), place.num_validated or 0)
        return "batches evaluated", count_text(sum(most.values()))
    return "steps done", count_text(max((place.global_step for _, place in places), default=0))


def _chapter(chapter: ChapterReport, report: RunReport) -> list[Child]:
    return [
        tag("section", tag("h2", "Where the time went"), account_bar(chapter.account)),
        tag("section", tag("h2", "Progress"), progress(chapter)),
        tag("section", tag("h2", "Processes"), _processes(chapter, report)),
        _evaluation_section(chapter, report.made),
        _autosave_section(chapter),
        _notes(chapter),
    ]


def _earlier(chapter: ChapterReport, report: RunReport) -> Markup:
    goodput = share_text(chapter.account.goodput)
    return tag(
        "section",
        tag("h2", f"Before that: {_span(chapter)}"),
        tag("p", f"{goodput} goodput of {duration_text(chapter.account.total)}."),
        account_bar(chapter.account),
        progress(chapter),
        _processes(chapter, report),
        class_="earlier",
    )


def _processes(chapter: ChapterReport, report: RunReport) -> Child:
    processes = chapter.chapter.processes
    rows = [_row(process, number, first=processes[0].began) for number, process in enumerate(processes, 1)]
    is_running = chapter.number == report.num_chapters and report.made - processes[-1].last_seen <= RUNNING_SECONDS
    if is_running and processes[-1].reason is None:
        rows[-1][-1] = "may be running"
    header = ("", "began", "ran", "continued from", "steps", "autosaves", "ended")
    made = table(header, rows, right=("ran", "steps", "autosaves"), firm=("", "began"), nouns="processes")
    return [made, _restored(chapter)]


def _row(process: Process, number: int, *, first: float) -> list[Child]:
    trained = [fit for fit in process.fits if fit.has_trained] or list(process.fits)
    first_fit = trained[0] if trained else None
    began = moment_text(process.began) if number == 1 else f"+ {duration_text(process.began - first)}"
    return [
        f"{number}",
        [began, tag("small", process.host) if process.host and number == 1 else None],
        duration_text(process.last_seen - process.began),
        _origin(first_fit),
        _steps(trained),
        count_text(sum(fit.num_autosaves for fit in process.fits)),
        _end(process),
    ]


def _origin(fit: FitHistory | None) -> Child:
    if fit is None or fit.started is None:
        return "did not come so far"
    if fit.resumed is None:
        return "the beginning"
    not_exact = fit.resumed.not_exact
    said = tag("small", _cut(f"not exact: {', '.join(not_exact)}")) if not_exact else None
    position = _cut(fit.resumed.position)
    return [tag("span", position, class_="firm" if len(position) <= _NUM_FIRM else None), said]


def _restored(chapter: ChapterReport) -> Child:
    """Return one line about the parts that every resumed fit restored exactly."""
    resumed = [fit.resumed for fit in chapter.chapter.fits if fit.resumed is not None]
    texts = [text for text in (resumed[0].exact if resumed else ()) if all(text in each.exact for each in resumed)]
    if not texts:
        return None
    often = "each time" if len(resumed) > 1 else ""
    return tag("p", f"Restored exactly{' ' * bool(often)}{often}: ", ", ".join(texts), ".", class_="soft below")


def _steps(fits: Sequence[FitHistory]) -> Child:
    fits = [fit for fit in fits if not fit.is_evaluation]
    places = [place for fit in fits for place in (fit.place, fit.last_place) if place is not None]
    if not places:
        return ""
    first, last = places[0].global_step, places[-1].global_step
    return f"{first:,} \N{EN DASH} {last:,}" if first != last else "none"


def _end(process: Process) -> Child:
    text = process.fits[-1].text if process.fits else ""
    reason = process.reason
    if reason is None:
        return "killed"
    return [_cut(reason), tag("small", _cut(text)) if text and text != reason and reason != FINISHED else None]


def _evaluation_section(chapter: ChapterReport, made: float) -> Child:
    runs = [run for fit in chapter.chapter.fits for run in fit.validations]
    evaluations = {fit.number: fit for fit in chapter.chapter.fits if fit.is_evaluation and fit.has_trained}
    if not runs and not evaluations:
        return None
    rows = [_evaluation_row(chapter, number, made) for number in sorted(evaluations)]
    header = ("", "processes", "began", "batches", "autosaves", "took", "ended")
    right = ("processes", "batches", "autosaves", "took")
    again = [f"Process {each.process + 1} {again_text(each, chapter.fit_of(each))}" for each in chapter.continued]
    if len(again) > _NUM_NOTES:
        again = [*again[-_NUM_NOTES:], f"and {len(again) - _NUM_NOTES:,} more before these"]
    return tag(
        "section",
        tag("h2", "Evaluation"),
        table(header, rows, right=right, firm=("", "began"), nouns="evaluations") if rows else None,
        tag("p", validation_text(runs, duration_text), class_="below" if rows else None) if runs else None,
        tag("ul", (tag("li", text) for text in again), class_="below") if again else None,
    )


def _evaluation_row(chapter: ChapterReport, number: int, made: float) -> list[Child]:
    processes = [one for one in chapter.chapter.processes if any(fit.number == number for fit in one.fits)]
    fits = [fit for one in processes for fit in one.fits if fit.number == number and fit.has_trained]
    seconds = [each.seconds for each in chapter.segments if each.fit == number and each.kind == EVALUATION]
    places = [fit.last_place for fit in fits if fit.last_place is not None]
    batches = max((place.num_validated or 0 for place in places), default=0)
    # Only the last chapter has this section.
    is_last = fits[-1] is chapter.chapter.fits[-1] and chapter.chapter.done is None
    return [
        fits[-1].name,
        count_text(len(fits)),
        moment_text(fits[0].started or fits[0].began),
        count_text(batches),
        count_text(sum(fit.num_autosaves for fit in fits)),
        duration_text(math.fsum(seconds)),
        _cut(end_text(fits[-1], is_last=is_last, made=made)),
    ]


def _autosave_section(chapter: ChapterReport) -> Child:
    autosaves = _autosaves(chapter)
    if not autosaves:
        return None
    number = sum(autosave.number for autosave in autosaves)
    seconds = sum(autosave.seconds for autosave in autosaves)
    sizes = [autosave.num_bytes for autosave in autosaves if autosave.num_bytes is not None]
    longest = max(autosave.longest for autosave in autosaves)
    in_background = sum(autosave.number for autosave in autosaves if autosave.is_in_background)
    text = f"{who_waited(chapter.chapter.fits)} waited {duration_text(seconds)} for {plural(number, 'autosave')}"
    text += f": {duration_text(seconds / number)} each, {duration_text(longest)} at most." if number > 1 else "."
    if sizes:
        text += f" {size_text(sum(sizes))} were written."
    if in_background:
        text += f" {'All' if in_background == number else count_text(in_background)} of them in the background."
    return tag("section", tag("h2", "Autosaves"), tag("p", text), autosave_bars(chapter, autosaves))


def _autosaves(chapter: ChapterReport) -> list[Autosave]:
    return sorted(
        chain.from_iterable(fit.autosaves for fit in chapter.chapter.fits), key=lambda autosave: autosave.time
    )


def _notes(chapter: ChapterReport) -> Child:
    resumed = [fit.resumed for fit in chapter.chapter.fits if fit.resumed is not None]
    texts = dict.fromkeys(
        chain.from_iterable((*(f"Not exact: {text}" for text in each.not_exact), *each.notes) for each in resumed)
    )
    processes = enumerate(chapter.chapter.processes, 1)
    fits = [(number, fit) for number, process in processes for fit in process.fits]
    unsaved = [f"Process {number} {unsaved_text(each, fit)}" for number, fit in fits for each in fit.unsaved]
    incidents = [f"Process {number} {text}" for number, fit in fits for text in fit.incidents]
    slow = slow_texts(chapter.chapter.fits)
    texts = dict.fromkeys((*skipped_texts(chapter.chapter), *incidents, *slow, *unsaved, *texts))
    if not texts:
        return None
    shown = [_cut(text) for text in list(texts)[:_NUM_NOTES]]
    if len(texts) > len(shown):
        shown.append(f"and {len(texts) - len(shown):,} more")
    return tag("section", tag("h2", "Notes"), tag("ul", (tag("li", text) for text in shown)))


def _branches(tree: Sequence[str]) -> Child:
    if not tree:
        return None
    title, *lines = tree
    return tag("section", tag("h2", title), tag("pre", "\n".join(lines)))


def _surroundings(report: RunReport, last: ChapterReport) -> Markup:
    hosts = list(dict.fromkeys(process.host for process in last.chapter.processes if process.host))
    ranks = list(dict.fromkeys(fit.num_ranks for fit in last.chapter.fits if fit.num_ranks is not None))
    places = [_place_text(fit, fit.last_place) for fit in last.chapter.fits if fit.last_place is not None]
    return tag(
        "section",
        tag("h2", "The run"),
        pairs(
            ("directory", tag("code", report.path)),
            ("last known place", places[-1] if places else None),
            ("ranks", ", then ".join(map(str, ranks)) or None),
            ("host" if len(hosts) == 1 else "hosts", _cut(", ".join(hosts)) or None),
            ("before this", _before(report)),
            ("report made", moment_text(report.made)),
        ),
    )


def _before(report: RunReport) -> str | None:
    texts = []
    if report.num_chapters > len(report.chapters):
        texts.append(
            f"the script was run from its beginning {plural(report.num_chapters - len(report.chapters), 'time')}"
        )
    if report.num_forgotten:
        texts.append(f"{plural(report.num_forgotten, 'process')} of which nothing is known anymore")
    if report.num_unread:
        texts.append(f"{plural(report.num_unread, 'line')} of the history could not be read")
    return "; ".join(texts) or None


def _place_text(fit: FitHistory, place: RunPlace) -> str:
    if fit.is_evaluation:
        return f"batch {place.num_validated or 0:,} of {fit.name}"
    return f"batch {place.batch:,} of epoch {place.epoch:,}, step {place.global_step:,}"


def _span(chapter: ChapterReport) -> str:
    began, ended = moment_text(chapter.began), moment_text(chapter.ended)
    same_day = began[:10] == ended[:10]
    return f"{began} to {ended[11:] if same_day else ended}"


def _foot() -> Markup:
    return tag(
        "footer",
        tag(
            "p",
            "Goodput is the share of the wall time in which training or evaluation made lasting progress. It does not "
            "include starting, saving, restoring, repeated work, and the time without a process. A killed process "
            "counts as ended at its last sign of life.",
        ),
    )


def _cut(text: str) -> str:
    return text if len(text) <= _NUM_TEXT else f"{text[: _NUM_TEXT - 3]}..."
