"""Safetensors that are already quantized: FP8, AWQ, GPTQ and compressed-tensors."""
