"""How griffe is to read the docstrings of this package: ``Example:`` is the section that it knows as ``Examples:``."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Lets examples be shown as code: a section that griffe doesn't know is a box of text."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section; called for each object that was read."""
        if obj.docstring is not None:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = re.sub(r"^( *)Example::$", r"\1**Example:**", text, flags=re.MULTILINE)
