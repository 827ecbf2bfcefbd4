"""What torch's DistributedDataParallel keeps, and no checkpoint holds."""
