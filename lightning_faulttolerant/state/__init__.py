"""What a run consists of besides weights: generators, gradients, buffers, metrics, flags. Knows torch only."""
