"""The order of the samples: mixing, shuffling, and dealing, as pure functions of seed, epoch, and position."""
