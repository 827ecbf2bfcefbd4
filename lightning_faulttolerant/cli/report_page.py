"""The page of a run, and the wording that it shares with the text of a report: times, places, and ends.

The page shows goodput, use of time, progress over the wall time, processes, and autosaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from lightning_faulttolerant.cli.html import Child, Markup, document, pairs, stats, table, tag
from lightning_faulttolerant.cli.report_pictures import account_bar, autosave_bars, progress
from lightning_faulttolerant.cli.text import count_text, duration_text, moment_text, plural, share_text, size_text
from lightning_faulttolerant.records.goodput import EVALUATION, Account, ChapterReport, RunReport
from lightning_faulttolerant.records.history import (
    FINISHED,
    Autosave,
    Chapter,
    FitHistory,
    Process,
    RunPlace,
    Unsaved,
    Validations,
    summed_times,
)
from lightning_faulttolerant.records.requests import skips_in_words

RUNNING_SECONDS = 90.0
"""A run may still be running if its last sign of life is at most this old. Below a URL there is one a minute."""


SECTION_NAMES = {
    "data": "waiting for data",
    "step": "its steps",
    "evaluation": "evaluation",
    "save": "the state for its saves",
}
"""What a rank loses its time with, by the name of the section in a history."""


def short_duration(seconds: float) -> str:
    """Return a duration in at most seven characters.

    Args:
        seconds: From 0.

    Example:
        >>> [short_duration(seconds) for seconds in (0, 0.0123, 1.25, 59.96, 3599.6, 86399.0, 200_000)]
        ['0 s', '12 ms', '1.2 s', '60 s', '1h 00m', '24h 00m', '2d 08h']
    """
    if seconds < 0.0005:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.5:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return "60 s"
    if seconds < 3599.5:
        return f"{round(seconds) // 60}m {round(seconds) % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 48 * 60:
        return f"{minutes // 60}h {minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d {hours % 24:02d}h"


def place_text(place: RunPlace | None, *, in_evaluation: bool = False) -> str:
    """Return a place as ``epoch:batch``, in a validation run with its batch after that; or "-" if it is not known.

    Args:
        place: A place in a run.
        in_evaluation: Whether it is a place in ``validate``, ``test``, or ``predict``: then only its batch counts.
    """
    if place is None:
        return "-"
    if in_evaluation:
        return f"{place.num_validated or 0}"
    inside = "" if place.num_validated is None else f":{place.num_validated}"
    return f"{place.epoch}:{place.batch}{inside}"


def repeated_texts(chapter: Chapter) -> Iterator[str]:
    """Yield a sentence for each process that has run batches again, with their number.

    Args:
        chapter: Any chapter.
    """
    for number, process in enumerate(chapter.processes, start=1):
        for fit in process.fits:
            place, repeats = fit.place, fit.resumed and fit.resumed.repeats
            if place is None or not repeats:
                continue
            of_fit = f"batch {place.batch} of epoch {place.epoch}"
            inside = place.num_validated
            run = fit.name if fit.is_evaluation else f"the validation run after {of_fit}"
            where = of_fit if inside is None else f"batch {inside} of {run}"
            yield f"Process {number} ran {plural(repeats, 'batch')} again, from {where} on."


def validation_text(runs: Sequence[Validations], duration: Callable[[float], str] = short_duration) -> str:
    """Return how many validation runs there were inside fits, and how long they took, without waiting for autosaves.

    Args:
        runs: All of them, at least one.
        duration: Returns the text for a number of seconds.
    """
    number, batches = sum(run.number for run in runs if run.is_over), sum(run.num_batches for run in runs)
    seconds = sum(run.seconds for run in runs)
    over = (
        f"{number:,} validation {'run' if number == 1 else 'runs'} inside fits" if number else "No validation run ended"
    )
    return f"{over}: {batches:,} {'batch' if batches == 1 else 'batches'} in {duration(seconds)}."


def who_waited(fits: Sequence[FitHistory]) -> str:
    """Return the word for what waits for autosaves in these fits and evaluations.

    Args:
        fits: At least one.
    """
    names = [
        name for name, is_evaluation in (("training", False), ("evaluation", True))
        if any(fit.is_evaluation is is_evaluation for fit in fits)
    ]  # fmt: skip
    return " and ".join(names).capitalize()


def unsaved_text(unsaved: Unsaved, fit: FitHistory) -> str:
    """Return how long a fit could save nothing, and why.

    Args:
        unsaved: The time in which nothing was saved.
        fit: The fit.
    """
    ended = fit.last_seen if unsaved.until is None else unsaved.until
    still = ", to its end" if unsaved.until is None else ""
    tries = f"{unsaved.tries} {'try' if unsaved.tries == 1 else 'tries'}"
    return f"could save nothing for {short_duration(ended - unsaved.since)}{still}, {tries}: {unsaved.text}"


def skipped_texts(chapter: Chapter) -> Iterator[str]:
    """Yield a sentence for each training batch that was left out.

    Args:
        chapter: Any chapter.
    """
    has_several = any(fit.number > 1 for fit in chapter.fits)
    for number, skips in sorted(chapter.skipped().items()):
        of_fit = f" of fit {number}" if has_several else ""
        for one in skips:
            why = f". It could not be loaded: {one.text}" if one.text else ", by --skip"
            yield f"{skips_in_words((one.epoch, one.batch)).capitalize()}{of_fit} was left out{why}."


def slow_texts(fits: Sequence[FitHistory]) -> list[str]:
    """Return which ranks kept the others waiting, and in which section each of them lost the time.

    Args:
        fits: All fits.
    """
    autosaves = [autosave for fit in fits for autosave in fit.autosaves]
    number = sum(autosave.number for autosave in autosaves)
    return [
        f"Rank {slow.rank} was {slow.slower:.0%} slower than the median of the others, in {SECTION_NAMES[slow.section]}"
        f" (at {slow.number} of {number} autosaves)."
        for slow in summed_times([slow for autosave in autosaves for slow in autosave.slow])
    ]


def end_text(fit: FitHistory, *, is_last: bool, made: float) -> str:
    """Return the reason why a fit ended, in a few words.

    Args:
        fit: Any fit.
        is_last: Whether nothing is known of the run after the fit.
        made: The current time.
    """
    if fit.reason is not None:
        return fit.reason
    if is_last and made - fit.last_seen <= RUNNING_SECONDS:
        return "may be running"
    return "killed" if fit.started is not None else "killed at start"


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
        return "ended before a fit"
    if fit.resumed is None:
        return "the beginning"
    not_exact = fit.resumed.not_exact
    said = tag("small", _cut(f"not exact: {', '.join(not_exact)}")) if not_exact else None
    position = _cut(fit.resumed.position)
    return [tag("span", position, class_="firm" if len(position) <= _NUM_FIRM else None), said]


def _restored(chapter: ChapterReport) -> Child:
    """Return one line about the parts that every resumed fit restored."""
    parts = [fit.resumed.restored for fit in chapter.chapter.fits if fit.resumed is not None]
    texts = [text for text in (parts[0] if parts else ()) if all(text in each for each in parts)]
    if not texts:
        return None
    often = " each time" if len(parts) > 1 else ""
    return tag("p", f"Restored{often}: ", ", ".join(texts), ".", class_="soft below")


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
    return tag(
        "section",
        tag("h2", "Evaluation"),
        table(header, rows, right=right, firm=("", "began"), nouns="evaluations") if rows else None,
        tag("p", validation_text(runs, duration_text), class_="below" if rows else None) if runs else None,
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
    repeated = repeated_texts(chapter.chapter)
    texts = dict.fromkeys((*skipped_texts(chapter.chapter), *incidents, *repeated, *slow, *unsaved, *texts))
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
