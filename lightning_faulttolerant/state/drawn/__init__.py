"""The values that a script drew before `fit`: a split, a shuffled list, a vocabulary from a set. Kept and restored."""
