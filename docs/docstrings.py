"""Let griffe read the docstrings of this package: its section ``Examples:`` is called ``Example:`` here."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Shows examples as code. griffe shows a section that it doesn't know as a box of text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section. griffe calls this for each object that it has read."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( *)Example::$", r"\1**Example:**", text, flags=re.MULTILINE)
