"""A run: its directory, its history, and the fingerprint that it is compared by."""
