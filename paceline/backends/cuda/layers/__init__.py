"""The layers of a model: weights, buffers, and the functions that launch their kernels."""
