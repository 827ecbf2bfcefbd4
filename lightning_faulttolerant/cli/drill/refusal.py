"""Find the error of this package that ended a script in the script's output."""

from __future__ import annotations

import re
from collections.abc import Sequence

# The last line of a traceback names the class with its module. torchrun and Lightning put the rank before it.
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?lightning_faulttolerant\.errors\.(\w+): (.*)$")
_MAX_LINES = 12


def refusal_in(lines: Sequence[str]) -> str | None:
    """Return the class and message of the last such error on one line, or ``None``.

    Args:
        lines: The end of a process's output.
    """
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[number])
        if match is None or match[1] == "DrillFault":
            continue
        rest = []
        for line in lines[number + 1 : number + _MAX_LINES]:
            if not line.startswith("  "):  # the indented lines list what is not exact
                break
            rest.append(line.strip())
        return f"{match[1]}: {' '.join([match[2], *rest])}"
    return None
