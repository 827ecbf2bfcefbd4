"""Interruptible samplers: the order is a pure function of (seed, epoch, position), the state a global count."""
