"""The building blocks of all kernels: instruction sets, vectors, float16, dot products, row operations."""
