"""The ranks of tensor parallelism: rank 0 is the engine's process, the others are started by it."""
