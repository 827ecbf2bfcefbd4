"""The files of incidents: next to the autosaves of a fit, never pruned, and never among those that a resume chooses."""

from __future__ import annotations

from pathlib import Path

from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import read_back
from lightning_faulttolerant.errors import DamagedCheckpointError
from lightning_faulttolerant.records.incidents import INCIDENTS_FOLDER, step_of_incident
from lightning_faulttolerant.storage.local import remove_abandoned
from lightning_faulttolerant.storage.store import Store, is_url, local_path


def save_incident(series: AutosaveSeries, checkpoint: dict[str, object], name: str) -> str:
    """Write the checkpoint of an incident, and verify it.

    Args:
        series: The autosaves of the fit.
        checkpoint: A dict that ``torch.save`` can write.
        name: Its name.

    Returns:
        Its path or URL.

    Raises:
        OSError: If it can't be written.
        DamagedCheckpointError: If it doesn't verify. It is deleted then.
        RunInUseError: If another process has taken over the directory; nothing was changed.
    """
    place = f"{INCIDENTS_FOLDER}/{name}"
    path = series.store.path(place)
    if not is_url(path):
        remove_abandoned(Path(local_path(path)).parent)  # what a killed process has left
    with series.store.writer(place) as file:
        save_to_file(checkpoint, file)
        series.check()
        damage = None if is_url(path) else read_back(file)
    if damage is not None:
        series.store.delete(place)
        raise DamagedCheckpointError(f"{path} does not read back as it was written: {damage}") from damage
    return path


def incident_paths(store: Store) -> list[str]:
    """Return the paths of the checkpoints of a fit's incidents, in the order of their steps.

    Args:
        store: The directory of the fit.
    """
    names = [name for name in store.folder(INCIDENTS_FOLDER).names() if step_of_incident(name) is not None]
    return [store.path(f"{INCIDENTS_FOLDER}/{name}") for name in sorted(names, key=lambda name: (len(name), name))]
