"""The parts of a run besides the weights: generators, gradients, buffers, metrics, flags. Knows torch only."""
