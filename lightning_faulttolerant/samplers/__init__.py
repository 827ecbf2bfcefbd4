"""Interruptible samplers: order is a pure function of (seed, epoch, position). Works without Lightning."""
