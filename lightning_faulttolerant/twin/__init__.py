"""A second copy of `lightning_faulttolerant.trainer` from the same files, for Trainers of ``pytorch_lightning``.

The two packages are one source under two names, so code that replaces methods of one's loops must be built with that
one's classes. Two kinds of modules are shared: those that keep something for the whole process, and those with objects
that both Trainers get.
"""

from __future__ import annotations

import importlib
import os
import sys

from lightning_faulttolerant.translation import Translation, TwinFinder

_PARENT = __name__.rpartition(".")[0]
_ORIGINAL = f"{_PARENT}.trainer"

# None of these imports Lightning at import time.
SHARED = (
    "bases",
    "callback",
    "save.checkpoint_io",
    "run.history_file",
    "settings",
    "process",
    "recorder",
    "resume.report",
    "run.directory",
    "identity.starts",
    "signals",
    "switch",
)

TRANSLATION = Translation(
    {"lightning.pytorch": "pytorch_lightning", "lightning.fabric": "lightning_fabric", _ORIGINAL: __name__}
)

TwinFinder(__name__, os.path.join(os.path.dirname(os.path.dirname(__file__)), "trainer"), TRANSLATION).install()
sys.modules.update({f"{__name__}.{name}": importlib.import_module(f"{_ORIGINAL}.{name}") for name in SHARED})
