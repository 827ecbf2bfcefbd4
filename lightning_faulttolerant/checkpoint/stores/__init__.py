"""The places for files: a directory of this machine, or a prefix of an object store."""
