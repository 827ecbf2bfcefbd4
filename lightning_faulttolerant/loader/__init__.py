"""A ``DataLoader`` that can say where it is and continue from there, worker randomness included. Knows torch only."""
