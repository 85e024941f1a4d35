"""A checkpoint's weights on the device, in the layout of the kernels."""
