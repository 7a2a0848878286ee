"""The load generator: CUDA work of known shape, without a CUDA toolkit."""
