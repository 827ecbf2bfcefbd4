"""Thin long series for a picture without a visible change; the extremes above all are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

Point: TypeAlias = tuple[float, float]

_Item = TypeVar("_Item")


def pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Return the stretches of a series between values that are not finite.

    Args:
        points: Points in the order in which a line joins them.
    """
    found: list[list[Point]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def thinned(points: Sequence[Point], *, num_columns: int) -> list[Point]:
    """Return the first, lowest, highest and last point of each column. The thinned curve looks the same.

    Args:
        points: Points from left to right.
        num_columns: Assumed number of columns of the picture.
    """
    if len(points) <= 4 * num_columns:
        return list(points)
    left, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(min(int((point[0] - left) / width * num_columns), num_columns - 1), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        least = min(range(len(column)), key=lambda index: column[index][1])
        greatest = max(range(len(column)), key=lambda index: column[index][1])
        kept.extend(column[index] for index in sorted({0, least, greatest, len(column) - 1}))
    return kept


def highest(points: Sequence[Point], *, num_columns: int) -> list[Point]:
    """Return the highest point of each column of a series, for bars that would cover each other.

    Args:
        points: Points from left to right.
        num_columns: Assumed number of columns of the picture.
    """
    if len(points) <= num_columns:
        return list(points)
    left, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    columns: dict[int, Point] = {}
    for point in points:
        column = min(int((point[0] - left) / width * num_columns), num_columns - 1)
        columns[column] = max(columns.get(column, point), point, key=lambda each: each[1])
    return list(columns.values())


def spread(items: Sequence[_Item], *, number: int) -> list[_Item]:
    """Return some of the items, evenly spread, including the first and the last.

    Args:
        items: Any items.
        number: Maximum number of items, from 2.
    """
    if len(items) <= number:
        return list(items)
    return [items[round(index * (len(items) - 1) / (number - 1))] for index in range(number)]
