"""`lightning_faulttolerant.trainer` once more, for Trainers of ``pytorch_lightning``: made from the same files.

The two packages are one source under two names, so what replaces methods of one's loops has to be made with the other's
classes. A module that keeps something for the whole process, or whose objects both Trainers are given, is shared.
"""

from __future__ import annotations

import importlib
import os
import sys

from lightning_faulttolerant.translation import Translation, TwinFinder

_PARENT = __name__.rpartition(".")[0]
_ORIGINAL = f"{_PARENT}.trainer"

# None of them imports Lightning when it is loaded.
SHARED = (
    "bases",
    "callback",
    "checkpoint_io",
    "deadline",
    "early_stop",
    "environment",
    "history_file",
    "launched",
    "options",
    "options_variable",
    "process",
    "recorder",
    "report",
    "run",
    "runs.places",
    "runs.recorded",
    "runs.starts",
    "serving",
    "stop",
    "switch",
    "under_way",
)

TRANSLATION = Translation(
    {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _ORIGINAL: __name__}
)

TwinFinder(__name__, os.path.join(os.path.dirname(os.path.dirname(__file__)), "trainer"), TRANSLATION).install()
sys.modules.update({f"{__name__}.{name}": importlib.import_module(f"{_ORIGINAL}.{name}") for name in SHARED})
