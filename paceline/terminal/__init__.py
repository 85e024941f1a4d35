"""The terminal side of `paceline generate` and `paceline chat`."""
