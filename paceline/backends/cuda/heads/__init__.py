"""Draft heads on the device: weights, passes, and runners."""
