"""The object state of a fit, and what the script drew before it."""
