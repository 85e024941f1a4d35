"""Decoding on a CUDA device with random weights of known shapes, beside torch and vLLM."""
