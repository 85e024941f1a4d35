"""Other engines, each in its own process."""
