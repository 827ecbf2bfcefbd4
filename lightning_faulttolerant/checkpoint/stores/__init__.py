"""Where files can be kept: a directory of this machine, or a prefix of an object store."""
