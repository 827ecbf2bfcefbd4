"""Files of a run beside its autosaves, which others write: a resume makes them go on where they were."""
