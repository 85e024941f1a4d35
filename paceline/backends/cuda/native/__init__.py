"""CUDA C++ kernels (source/*.cu), compiled by NVRTC. Each has the bits of a Triton kernel, its fallback."""
