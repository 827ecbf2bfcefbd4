"""Files of a run besides its autosaves, written by others: after a resume they continue where they were."""
