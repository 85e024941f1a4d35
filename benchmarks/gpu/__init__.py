"""Decoding on a CUDA device with random weights of known shapes, compared with torch and vLLM."""
