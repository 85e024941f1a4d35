"""The CUDA backend: Triton and CUDA C++ kernels in CUDA graphs."""
