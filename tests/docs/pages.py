"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRELUDES = Path(__file__).parent / "preludes"

# Pages that a user reads, by their paths in the repository.
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
)
_FENCE = re.compile(r"^( *)(`{3,})([^\n`]*)\n(.*?)^\1\2$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        language: The first word after the opening fence.
        why_not_run: The text after ``not run:`` in the block's title, if it has one.
        code: The lines between the fences.
        line: The number of lines of the page above the code.
    """

    language: str
    why_not_run: str
    code: str
    line: int

    @property
    def runs(self) -> bool:
        """Whether this is Python that must run unchanged."""
        return self.language == "python" and not self.why_not_run


def read(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of code of a page, including those in lists and tabs."""
    text = read(page)
    for fence in _FENCE.finditer(text):
        indent, _, info, code = fence.groups()
        why_not = re.search(r'title="not run: ([^"]+)"', info)
        yield Block(
            language=info.split()[0] if info.split() else "",
            why_not_run=why_not[1] if why_not else "",
            code="".join(line.removeprefix(indent) for line in code.splitlines(keepends=True)),
            line=text.count("\n", 0, fence.start(4)),
        )


def prose(page: str) -> str:
    """Return a page without its blocks of code."""
    return _FENCE.sub("", read(page))


def prelude(page: str) -> Path:
    """Return the path of the file that defines the names that a page assumes; most pages have none."""
    return (PRELUDES / page).with_suffix(".py")
