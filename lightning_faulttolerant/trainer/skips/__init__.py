"""Training batches that a run leaves out."""
