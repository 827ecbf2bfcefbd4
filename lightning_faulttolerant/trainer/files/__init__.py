"""Files of a run beside its autosaves, which others write: a resume makes them continue where they were."""
