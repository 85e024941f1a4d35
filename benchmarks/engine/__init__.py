"""Measurements of the engine: passes, concurrency, drafters, quantization, byte identity."""
