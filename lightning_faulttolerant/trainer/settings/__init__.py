"""The arguments of `FaultTolerance`, and the environment variables that set them."""
