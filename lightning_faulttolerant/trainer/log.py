"""The messages that a run prints besides Lightning's, if the level of our logger allows it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info

from lightning_faulttolerant.errors import worded
from lightning_faulttolerant.trainer.identity.starts import discard_line
from lightning_faulttolerant.trainer.resume.report import ResumeReport

_MAX_REASONS = 3
_UNITS = (("s", 1, 120), ("min", 60, 7_200), ("h", 3_600, 172_800), ("days", 86_400, float("inf")))
"""For each unit, its seconds, and the largest number of seconds shown in it."""

_package = logging.getLogger("lightning_faulttolerant")


def tell(text: str) -> None:
    """Print `text` on rank zero, above a tqdm bar, unless the user has set the level of our logger above ``INFO``.

    Lightning's logger prints it: by default, Python shows only the warnings of all other loggers.
    """
    if _package.level <= logging.INFO and not _package.disabled:  # it is 0 if nothing has set it
        with Tqdm.external_write_mode(nolock=False):
            # A bar of rich replaces the stream, and leaves the cursor at the end of its line.
            rank_zero_info("%s%s", "\n" * type(sys.stderr).__module__.startswith("rich."), worded(text))


def tell_resumed(report: ResumeReport, notes: Sequence[str] = (), *, is_own: bool) -> None:
    """Print what is resumed, from where, and in a second line what is not exact; the log has all of it at ``DEBUG``.

    Args:
        report: The report.
        notes: Those of its notes that a user must see at once.
        is_own: Whether the checkpoint is an autosave of the run that continues.
    """
    reasons = report.all_not_exact or notes
    more = f"; {len(reasons) - _MAX_REASONS} more in the report" if len(reasons) > _MAX_REASONS else ""
    second = f"\n  {'note' if report.is_exact else 'NOT EXACT'} {'; '.join(reasons[:_MAX_REASONS])}{more}"
    advice = f". To start over instead, type: {discard_line(report.path)}" if is_own else ""
    proof = f": {report.proof}" if str(report.proof) else ""
    tell(f"{report.title}, from {report.path}{_age_of(report.path)}{proof}{advice}{second if reasons else ''}")
    _package.debug("%s", report)


def _age_of(path: str) -> str:
    try:
        seconds = max(time.time() - os.path.getmtime(path), 0)
    except OSError:  # it is a URL
        return ""
    unit, size, _ = next(one for one in _UNITS if seconds < one[2])
    return f" ({seconds // size:.0f} {unit} old)"
