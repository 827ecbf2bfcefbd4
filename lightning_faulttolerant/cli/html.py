"""HTML and SVG that are escaped by construction: only `tag` turns text into markup.

A whole page is one file that makes no requests. It contains its style and its script, and no others may run. Tables
become lists of named values on a narrow page, and fold their middle if they are long.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Markup:
    """Text that is HTML already. Only this package creates it; anything else on a page is escaped.

    Args:
        html: The HTML source.
    """

    html: str


Child: TypeAlias = "Markup | str | int | float | Iterable[Child] | None"
Attribute: TypeAlias = "str | int | float | None"

_VOID = frozenset({"meta", "link", "br", "input"})
_SHAPES = frozenset({"path", "line", "rect", "circle"})

# Characters that a page can't hold, characters that can't be written to a file, and characters that change the text
# direction. Text from a path or a command line may contain any of them.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """Return an element.

    Args:
        name: Name of the element.
        children: Content of the element. Text is escaped, markup is not, ``None`` is skipped, iterables are expanded.
        attributes: Attributes of the element. An underscore stands for a hyphen; a trailing one is dropped
            (``class_``). An attribute that is ``None`` is left out.

    Example:
        >>> tag("p", "a < b", tag("b", 3), class_="note").html
        '<p class="note">a &lt; b<b>3</b></p>'
    """
    opening = name + "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    if name in _VOID:
        return Markup(f"<{opening}>")
    inner = joined(*children).html
    return Markup(f"<{opening}/>" if name in _SHAPES and not inner else f"<{opening}>{inner}</{name}>")


def joined(*children: Child) -> Markup:
    """Return children one after the other, as `tag` would contain them.

    Args:
        children: As in `tag`.
    """
    return Markup("".join(_html_of(child) for child in children))


def escaped(text: str) -> str:
    r"""Return text as HTML that shows it. Characters that a page can't hold become escapes.

    Args:
        text: Any text.

    Example:
        >>> escaped("<a\x00>")
        '&lt;a\\x00&gt;'
    """
    return html.escape(_UNSAFE.sub(lambda found: found.group().encode("unicode_escape").decode(), text))


def _html_of(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Markup):
        return child.html
    if isinstance(child, (str, int, float)):
        return escaped(str(child))
    return "".join(_html_of(each) for each in child)


def _attribute(key: str, value: str | int | float) -> str:
    return f' {key.rstrip("_").replace("_", "-")}="{escaped(str(value))}"'


def document(title: str, *body: Child) -> str:
    """Return a self-contained page that also works without scripts.

    Its content security policy forbids the browser all requests, and all scripts and styles except its own two, which
    it names by their digests. If text ever slipped through unescaped, it would still do nothing.

    Args:
        title: Title of the browser tab.
        body: Content of the page.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", title),
        tag("link", rel="icon", href="data:,"),  # otherwise the browser requests an icon from the server
        tag("style", Markup(style)),
    )
    page = tag("html", head, tag("body", tag("main", *body), tag("script", Markup(script))), lang="en")
    return f"<!doctype html>\n{joined(page).html}\n"


@cache
def _asset(name: str) -> str:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return "\n" + "\n".join(line for line in text.splitlines() if line.strip()) + "\n"


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


_NUM_FIRST, _NUM_LAST, _NUM_FOLDED = 4, 16, 300


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[Child]],
    *,
    right: Sequence[str] = (),
    firm: Sequence[str] = (),
    nouns: str = "rows",
) -> Markup:
    """Return a table. A long table shows its first and last rows; the reader can unfold the others.

    Args:
        header: Names of the columns.
        rows: Their cells.
        right: Columns that are aligned to the right. Their lines are not broken.
        firm: Other columns with lines that are not broken.
        nouns: Noun for the rows.
    """
    classes = ["number" if name in right else "firm" if name in firm else None for name in header]
    columns = list(zip(header, classes, strict=True))
    names = tag("tr", (tag("th", name, class_=class_, scope="col") for name, class_ in columns))
    made = [
        tag("tr", (_cell(name, cell, class_) for (name, class_), cell in zip(columns, row, strict=True)))
        for row in rows
    ]
    return tag("table", tag("thead", names), _bodies(made, num_columns=len(header), nouns=nouns))


def pairs(*entries: tuple[str, Child]) -> Markup:
    """Return names with their values, for data that is not a table.

    Args:
        entries: Names and values. An entry with the value None is left out.
    """
    return tag(
        "dl", ((tag("dt", name), tag("dd", value)) for name, value in entries if value is not None), class_="pairs"
    )


def stats(*entries: tuple[str, str]) -> Markup:
    """Return a row of numbers with the name below each.

    Args:
        entries: The name and the number of each entry.
    """
    return tag("dl", (tag("div", tag("dt", name), tag("dd", value)) for name, value in entries), class_="stats")


def _bodies(rows: Sequence[Markup], *, num_columns: int, nouns: str) -> list[Markup]:
    middle = rows[_NUM_FIRST:-_NUM_LAST]
    if len(middle) <= 4:
        return [tag("tbody", rows)]
    text = f"show the {len(middle):,} {nouns} between"
    if len(middle) > _NUM_FOLDED:
        text = f"{len(middle):,} {nouns} between; show the last {_NUM_FOLDED} of them"
    switch = tag("label", tag("input", type="checkbox"), text)
    return [
        tag("tbody", rows[:_NUM_FIRST]),
        tag("tbody", tag("tr", tag("td", switch, colspan=num_columns)), class_="switch"),
        tag("tbody", middle[-_NUM_FOLDED:], class_="folded"),
        tag("tbody", rows[-_NUM_LAST:]),
    ]


def _cell(name: str, cell: Child, class_: str | None) -> Markup:
    return tag("td", cell, class_=class_, data_name=name or None)


def figure(*children: Child, caption: Child = None, legend: Child = None) -> Markup:
    """Return a chart with a line above it for the caption, the legend, and the readout.

    Args:
        children: The chart.
        caption: Description of the chart, in a few words.
        legend: The result of `legend`.
    """
    head = tag("figcaption", tag("span", caption) if caption else None, legend, tag("output", class_="readout"))
    return tag("figure", head, *children)


def legend(*entries: tuple[str, str]) -> Markup:
    """Return a legend for the colors of a chart.

    Args:
        entries: The style class and the name of each entry.
    """
    return tag(
        "span",
        (tag("span", tag("i", class_=f"key {class_}"), name) for class_, name in entries),
        class_="legend",
    )
