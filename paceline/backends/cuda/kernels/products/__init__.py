"""Matrix products of few rows, in 16, 8 and 4 bits, with LoRA adapters."""
