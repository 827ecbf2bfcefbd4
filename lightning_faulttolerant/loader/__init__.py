"""A ``DataLoader`` that can say where it is and go on from there, worker randomness included. Knows torch only."""
