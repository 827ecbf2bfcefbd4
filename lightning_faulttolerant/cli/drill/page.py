"""The page of a drill: its verdict, the curves of both runs over each other, the strikes, and the difference."""

from __future__ import annotations

import shlex
from pathlib import Path

from lightning_faulttolerant.cli.drill.picture import picture
from lightning_faulttolerant.cli.drill.result import DIFFERS, EXACT, DrillResult, RunOfDrill, Strike, equal_before
from lightning_faulttolerant.cli.page.html import Child, Markup, document, pairs, stats, table, tag
from lightning_faulttolerant.cli.page.numbers import count_text, duration_text, plural
from lightning_faulttolerant.cli.text import moment_text

_NUM_VALUES = 12


def page(result: DrillResult) -> str:
    """Return the page of a drill, a single file that makes no requests.

    Args:
        result: The result of the drill.
    """
    return document(
        f"Drill: {result.verdict.word}",
        _head(result),
        _difference(result),
        _cause(result),
        _last_words(result),
        _curves(result),
        _strikes(result),
        _compared(result),
        _surroundings(result),
        _foot(result),
    )


def _head(result: DrillResult) -> Markup:
    verdict = result.verdict
    class_ = {EXACT: "is-exact", DIFFERS: "is-differs"}.get(verdict.word)
    return tag(
        "header",
        tag("p", "Drill of ", tag("b", _script(result.command)), ", ", moment_text(result.began), class_="over"),
        tag("h1", _capitalized(verdict.word)),
        tag("p", verdict.text, class_="lead"),
        _list(verdict.notes),
        _stats(result),
        class_=class_,
    )


def _script(command: tuple[str, ...]) -> str:
    """Return the name of the Python file in a command, or the name of the command itself."""
    return next((Path(word).name for word in command if word.endswith(".py")), Path(command[0]).name)


def _stats(result: DrillResult) -> Markup:
    run = result.interrupted or result.uninterrupted
    num_twice = sum(strike.num_twice for strike in result.strikes)
    entries = [("strikes", f"{len(result.strikes)} of {result.num_wanted}")]
    if run is not None:
        entries.append(("training batches", count_text(len(run.curve))))
    if run is not None and run.num_evaluated:
        entries.append(("evaluation batches", count_text(run.num_evaluated)))
    if result.interrupted is not None:
        entries.append(("done twice", count_text(num_twice)))
        entries.append(("processes", count_text(result.interrupted.num_processes)))
    return stats(*entries, ("for the whole drill", duration_text(result.seconds)))


def _difference(result: DrillResult) -> Child:
    difference = result.verdict.difference
    if difference is None:
        return None
    other = "interrupted" if result.interrupted is not None else "the same once more"
    shown = difference.values[:_NUM_VALUES]
    rows = (
        (
            tag("span", value.name, class_="name"),
            tag("span", value.expected, class_="mono", data_name="uninterrupted"),
            tag("span", value.found, class_="mono found", data_name=other),
        )
        for value in shown
    )
    heads = (tag("span", text, class_="head") for text in ("", "uninterrupted", other))
    left_out = len(difference.values) - len(shown)
    process = f", in process {difference.process + 1} of the interrupted run" if result.interrupted is not None else ""
    rank = f", on rank {difference.rank}" if difference.rank else ""
    return tag(
        "section",
        tag("h2", "The first difference"),
        tag("p", f"{_capitalized(difference.place)}{rank}{process}. {equal_before(difference, result.strikes)}"),
        tag("div", heads, rows, class_="values"),
        tag("p", f"and {plural(left_out, 'value')} more", class_="soft") if left_out > 0 else None,
        tag("p", "Equal in it: ", ", ".join(difference.equal), ".", class_="soft") if difference.equal else None,
    )


def _cause(result: DrillResult) -> Child:
    cause = result.verdict.cause
    if cause is None:
        return None
    return tag(
        "section",
        tag("h2", "Likely cause: ", cause.part),
        tag("p", cause.text),
        [tag("h3", "What to do"), _list(cause.advice)] if cause.advice else None,
    )


def _last_words(result: DrillResult) -> Child:
    if not result.last_words:
        return None
    text = "\n".join(result.last_words)
    return tag("section", tag("h2", "The end of its output"), tag("code", text, class_="command"))


def _curves(result: DrillResult) -> Child:
    drawn = picture(result)
    return None if drawn is None else tag("section", tag("h2", "Both runs, batch by batch"), drawn)


def _strikes(result: DrillResult) -> Child:
    if not result.strikes:
        return None
    header = ("strike", "hit", "batches done", "continued from", "done twice", "process ran", "to the next batch")
    rows = [_strike_row(strike) for strike in result.strikes]
    right = ("batches done", "done twice", "process ran", "to the next batch")
    return tag("section", tag("h2", "Strikes"), table(header, rows, right=right, nouns="strikes"))


def _strike_row(strike: Strike) -> list[Child]:
    hook = f" ({strike.hook})" if strike.hook else ""
    wait = "never" if strike.seconds_to_first_batch is None else duration_text(strike.seconds_to_first_batch)
    return [
        f"{strike.number}. {strike.kind}{hook}",
        strike.place,
        count_text(strike.at),
        strike.resumed_text,
        count_text(strike.num_twice),
        duration_text(strike.seconds_in_process),
        wait,
    ]


def _compared(result: DrillResult) -> Child:
    runs = [run for run in (result.uninterrupted, result.repeated, result.interrupted) if run is not None]
    if not runs:
        return None
    header = ("run", "batches", "evaluation batches", "validations", "times logged", "autosaves", "processes", "took")
    return tag(
        "section",
        tag("h2", "What was compared"),
        table(header, [_run_row(run) for run in runs], right=header[1:], nouns="runs"),
    )


def _run_row(run: RunOfDrill) -> list[Child]:
    return [
        run.name if run.is_complete else f"{run.name}, did not finish",
        count_text(len(run.curve)),
        count_text(run.num_evaluated),
        count_text(run.num_validations),
        count_text(run.num_logs),
        count_text(run.num_autosaves),
        count_text(run.num_processes),
        duration_text(run.seconds),
    ]


def _surroundings(result: DrillResult) -> Markup:
    run = result.uninterrupted
    return tag(
        "section",
        tag("h2", "Command and surroundings"),
        tag("code", shlex.join(result.command), class_="command"),
        pairs(
            ("kind of strikes", result.kind),
            ("seed of their moments", str(result.seed)),
            ("ranks", None if run is None else count_text(run.num_ranks)),
            *((name, text) for name, text in result.versions.items()),
            ("ledgers and output", tag("code", result.directory) if result.directory else None),
        ),
    )


def _foot(result: DrillResult) -> Child:
    if result.interrupted is None and result.repeated is None:
        return None
    text = (
        "Compared bit for bit: the samples and the contents of each batch, the states of the generators, losses and "
        "learning rates, what steps and ends of evaluations returned, the results of validation runs, logged values, "
        "the final weights and optimizers."
    )
    return tag("footer", tag("p", text))


def _list(texts: tuple[str, ...]) -> Child:
    return tag("ul", (tag("li", text) for text in texts)) if texts else None


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
