"""Draft heads on the device: weights, passes, and the runners that the drafters call."""
