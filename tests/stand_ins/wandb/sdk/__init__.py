"""Parts of the SDK."""
