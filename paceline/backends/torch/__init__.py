"""The reference backend, in plain torch: the readable form of what the others compute."""
