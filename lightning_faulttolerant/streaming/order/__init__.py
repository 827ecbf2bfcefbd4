"""Which sample comes when: mixing, shuffling and dealing, as pure functions of seed, epoch and position."""
