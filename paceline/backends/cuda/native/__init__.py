"""CUDA C++ kernels (source/*.cu), compiled by NVRTC, each beside the Triton kernel whose bits it has."""
