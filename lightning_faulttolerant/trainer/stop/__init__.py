"""Stops: signals, deadlines, SLURM, and the agreement of the ranks on where to stop."""
