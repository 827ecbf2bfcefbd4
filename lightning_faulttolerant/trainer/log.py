"""The messages that a run prints besides Lightning's, if the level of our logger allows it."""

from __future__ import annotations

import logging
import sys

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities import rank_zero_info

from lightning_faulttolerant.errors import worded

_package = logging.getLogger("lightning_faulttolerant")


def tell(text: str) -> None:
    """Print `text` on rank zero, above a tqdm bar, unless the user has set the level of our logger above ``INFO``.

    Lightning's logger prints it: by default, Python shows only the warnings of all other loggers.
    """
    if _package.level <= logging.INFO and not _package.disabled:  # it is 0 if nothing has set it
        with Tqdm.external_write_mode(nolock=False):
            # A bar of rich replaces the stream, and leaves the cursor at the end of its line.
            rank_zero_info("%s%s", "\n" * type(sys.stderr).__module__.startswith("rich."), worded(text))
