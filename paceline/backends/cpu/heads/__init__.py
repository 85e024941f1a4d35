"""Draft heads beside the target: their passes, and the chains they draft."""
