"""A ``DataLoader`` that reports its position and continues from it, including worker randomness. Knows torch only."""
