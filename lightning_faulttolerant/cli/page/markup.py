"""HTML and SVG that are escaped by construction: only `tag` turns text into markup."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
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
