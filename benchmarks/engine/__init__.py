"""Single measurements of the engine: passes, requests at once, drafters, quantization, same bytes."""
