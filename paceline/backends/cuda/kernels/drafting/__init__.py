"""Kernels that draft: inputs and outputs of draft heads, and prompt lookup."""
