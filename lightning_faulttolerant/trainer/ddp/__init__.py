"""State of torch's DistributedDataParallel that no checkpoint holds."""
