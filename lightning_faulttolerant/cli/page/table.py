"""Tables that become lists of named values where a page is narrow, and fold their middle where they are long."""

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
    """Return a table; of many rows the first and the last are shown, the others where a reader asks for them.

    Args:
        header: Names of the columns.
        rows: Their cells.
        right: The columns that are aligned to the right; their lines are not broken.
        firm: Other columns whose lines are not broken.
        nouns: What the rows are.
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
    """Return names with their values, for what is no table.

    Args:
        entries: A name and its value; left out where the value is None.
    """
    return tag(
        "dl", ((tag("dt", name), tag("dd", value)) for name, value in entries if value is not None), class_="pairs"
    )


def stats(*entries: tuple[str, str]) -> Markup:
    """Return a row of numbers with their names below.

    Args:
        entries: For each its name and the number.
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
