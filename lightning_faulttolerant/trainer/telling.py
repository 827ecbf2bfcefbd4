"""What a run says of itself, beside what Lightning says, if the level of our logger allows it."""

from __future__ import annotations

import logging

from lightning.pytorch.utilities import rank_zero_info

from lightning_faulttolerant.advice import worded

_package = logging.getLogger("lightning_faulttolerant")


def tell(text: str) -> None:
    """Say `text`, on rank zero, unless the user has set the level of our logger above that of information.

    It is Lightning's logger that says it: by default Python shows of all others warnings only.
    """
    if _package.level <= logging.INFO and not _package.disabled:  # it is 0 where nobody has set it
        rank_zero_info(worded(text))
