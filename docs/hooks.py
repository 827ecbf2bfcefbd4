"""Make the pages of the site look as on the code host, and turn each file that they link to into a page.

MkDocs calls these functions. A file outside of docs/ that a page links to (an example, a benchmark, the README) becomes
a page below ``repository/`` that shows it, so that the link works in the site without knowing where the code is hosted.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

_REPOSITORY = Path(__file__).parents[1]
_SHOWN = "repository/"
# What the search shows first and last.
_BOOSTS = {"docs/troubleshooting": 4, "docs/guides": 2, "docs/decisions": 0.3}
_DECISIONS = "docs/decisions/README.md"
_LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
_LANGUAGES = {".py": "python", ".sbatch": "bash", ".sh": "bash", ".yaml": "yaml", ".yml": "yaml", ".toml": "toml"}
_LOADED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_config(config: MkDocsConfig) -> None:
    """Let a pattern in the navigation stand for the pages that match it."""
    config.nav = _without_patterns(config.nav, Path(config.docs_dir))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that a page links to, and for those that such pages link to."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    waiting += [(name, (_REPOSITORY / name).read_text("utf-8")) for name in ("CONTRIBUTING.md", "CHANGELOG.md")]
    for name, _ in waiting[-2:]:
        _add(name, files, config)
    while waiting:
        origin, text = waiting.pop()
        for target in _targets(origin, text):
            if target.startswith("docs/") or files.get_file_from_path(_uri(target)) is not None:
                continue
            _add(target, files, config)
            if target.endswith(".md"):
                waiting.append((target, (_REPOSITORY / target).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to the pages of `on_files`, and lists and tables begin where they begin on the code host."""
    origin = _origin(page.file.src_uri)
    directory = posixpath.dirname(page.file.src_uri)

    def of_site(match: re.Match[str]) -> str:
        path, hash_sign, heading = match[0].partition("#")
        target = _target(origin, path)
        if target is None:
            return match[0]
        return posixpath.relpath(_uri(target), directory or ".") + hash_sign + heading

    if not page.file.src_uri.startswith(_SHOWN):
        page.meta["search"] = {"boost": next((by for path, by in _BOOSTS.items() if origin.startswith(path)), 1)}
    if origin == _DECISIONS:
        markdown += _list_of_decisions()
    lines: list[str] = []
    for line, is_code in _lines(markdown):
        if not is_code and lines and _begins_a_block(line, lines[-1]):
            lines.append("")
        lines.append(line if is_code else _LINK.sub(of_site, line))
    return "\n".join(lines)


def on_page_content(html: str, page: Page, **_: Any) -> str:
    """Put pictures with a light and a dark scheme into the page: a file can't know which scheme is selected."""

    def with_picture(match: re.Match[str]) -> str:
        path = Path(page.file.abs_src_path or _REPOSITORY).parent / match[1]
        picture = path.read_text("utf-8") if path.is_file() else ""
        return picture.strip() if "data-md-color-scheme" in picture else match[0]

    return re.sub(r'<img [^>]*src="([^"]+\.svg)"[^>]*>', with_picture, html)


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site that loads anything from elsewhere."""
    for path in Path(config.site_dir).rglob("*.html"):
        if found := _LOADED.search(path.read_text("utf-8")):
            raise PluginError(f"{path} loads something from another host: {found[0]}")


def _without_patterns(nav: Any, directory: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _without_patterns(part, directory) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    parts: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            parts += sorted(str(path.relative_to(directory)) for path in directory.glob(part))
        else:
            parts.append(_without_patterns(part, directory))
    return parts


def _list_of_decisions() -> str:
    """Return the list of files in the folder, which the code host shows next to the page."""
    rows = ["", "| | |", "| --: | --- |"]
    for path in sorted((_REPOSITORY / _DECISIONS).parent.glob("0*.md")):
        number, _, title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        rows.append(f"| {number} | [{title}]({path.name}) |")
    return "\n".join(rows)


def _targets(origin: str, text: str) -> Iterator[str]:
    """Yield the paths in the repository that a page links to."""
    for line, is_code in _lines(text):
        if not is_code:
            for match in _LINK.finditer(line):
                target = _target(origin, match[0].partition("#")[0])
                if target is not None:
                    yield target


def _target(origin: str, path: str) -> str | None:
    """Return the file that a link of `origin` leads to, or None if it is on the same page or not in the repository."""
    if not path or ":" in path:
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
    if (_REPOSITORY / target).is_dir() and (_REPOSITORY / target / "README.md").exists():
        return f"{target}/README.md"
    return target


def _uri(target: str) -> str:
    """Return the page or file of the site that shows a file of the repository."""
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    if target.endswith(".md"):
        return _SHOWN + target
    return f"{_SHOWN}{target}/index.md" if (_REPOSITORY / target).is_dir() else f"{_SHOWN}{target}.md"


def _origin(uri: str) -> str:
    return uri.removeprefix(_SHOWN) if uri.startswith(_SHOWN) else f"docs/{uri}"


def _add(target: str, files: Files, config: MkDocsConfig) -> None:
    """Add the page that shows `target`."""
    path = _REPOSITORY / target
    if target.endswith(".md"):
        content = path.read_text("utf-8")
    elif path.is_dir():
        names = sorted(each.name for each in path.iterdir() if not each.name.startswith((".", "_")))
        content = f"# {target}\n\n" + "\n".join(f"- `{name}`" for name in names)
    else:
        language = _LANGUAGES.get(path.suffix, "text")
        content = f"# {path.name}\n\n`{target}`\n\n````{language}\n{path.read_text('utf-8').rstrip()}\n````\n"
    head = "---\nsearch:\n  exclude: true\n---\n\n"
    page = File.generated(config, _uri(target), content=head + content, inclusion=InclusionLevel.NOT_IN_NAV)
    files.append(page)


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is part of a block of code."""
    fence = ""
    for line in text.split("\n"):
        mark = re.match(r"\s*(`{3,})", line)
        if fence:
            yield line, True
            if mark and mark[1] == fence:
                fence = ""
        else:
            fence = mark[1] if mark else ""
            yield line, bool(mark)


def _begins_a_block(line: str, before: str) -> bool:
    """Return whether a list, a table, or a comment begins or ends here without the empty line that MkDocs needs."""
    if not before.strip() or not line.strip():
        return False
    if before.startswith("<!--") or line.startswith("<!--"):
        return True
    is_item = re.compile(r"([-*]|\d+\.) ")
    if is_item.match(line):
        return not is_item.match(before) and not before.startswith(" ")
    return line.startswith("|") and not before.startswith("|")
