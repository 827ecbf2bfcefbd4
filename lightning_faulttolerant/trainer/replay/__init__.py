"""A replay: a run continues from one of its older autosaves up to a step, and nothing of the run itself is touched."""
