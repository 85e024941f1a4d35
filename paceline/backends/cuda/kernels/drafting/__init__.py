"""Kernels of draft heads, and prompt lookup."""
