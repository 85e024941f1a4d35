"""Matrix products with weights of 16, 8 and 4 bits, fused norms and activations, and LoRA adapters."""
