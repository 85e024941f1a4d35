"""The layers of a model: which kernels run, over which weights and buffers."""
