"""What makes the suite fast, and keeps it so: where its files lie, what its runs share, in which order it goes."""
