"""Tables that become lists of named values on a narrow page, and fold their middle if they are long."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_faulttolerant.cli.page.markup import Child, Markup, tag

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
