"""A whole page as one file that makes no requests. It contains its style and its script, and no others may run."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from lightning_faulttolerant.cli.page.markup import Child, Markup, joined, tag


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
