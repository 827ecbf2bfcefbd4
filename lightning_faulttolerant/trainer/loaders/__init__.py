"""The loaders of a fit: each is replaced by a copy that can be followed."""
