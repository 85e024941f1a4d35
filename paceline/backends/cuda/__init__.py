"""The CUDA backend: graphs and Triton kernels."""
