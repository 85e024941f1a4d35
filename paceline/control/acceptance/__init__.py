"""The acceptance model: how likely each drafted node is to be accepted."""
