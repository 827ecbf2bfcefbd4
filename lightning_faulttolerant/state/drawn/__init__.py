"""What a script drew before `fit`: a split, a shuffled list, a vocabulary made of a set. Kept, and put back."""
