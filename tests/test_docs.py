"""The code on the pages of the documentation runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["samplers", "streaming"])
def test_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page run one after the other, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) > 3
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        # On its line of the page, so that an error says where it is.
        code = "\n" * text.count("\n", 0, block.start(1)) + block[1]
        exec(compile(code, f"docs/{page}.md", "exec"), names)


@pytest.mark.parametrize("page", [path.name for path in sorted(DOCS.glob("*.md"))])
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    """Each file that a page links to is there, and each heading on one."""
    text = (DOCS / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, heading = target.partition("#")
        found = (DOCS / path).resolve() if path else DOCS / page
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {_anchor(each) for each in headings}, target


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
