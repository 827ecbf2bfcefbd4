"""What saves one fit once it has begun: its autosaves, and our part of the checkpoints that other code saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from lightning_faulttolerant.trainer.save.hook_saves import HookSaves
from lightning_faulttolerant.trainer.save.run_state import Capture, RunState


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointer:
    """Saves one fit.

    Args:
        run_state: Reads the state of the fit.
        autosaver: Writes autosaves.
        hook_saves: Creates our part of other checkpoints.
    """

    run_state: RunState
    autosaver: Autosaver
    hook_saves: HookSaves

    def put_part(self, checkpoint: dict[str, Any], capture: Capture | None) -> None:
        """Put our part into a checkpoint that other code is saving.

        Args:
            checkpoint: The checkpoint.
            capture: The last capture, if any.
        """
        contents = self.autosaver.contents
        if not contents.is_dumping:
            hook, saver = compat.running_hook(self.run_state.trainer)
            contents.put_part(checkpoint, self.hook_saves.make(hook, saver, capture))
