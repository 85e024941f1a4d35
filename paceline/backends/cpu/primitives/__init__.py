"""What all kernels are made of: instruction sets, vectors, half floats, dot products, row operations."""
