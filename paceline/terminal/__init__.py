"""The terminal: what `paceline generate` and `paceline chat` show and ask."""
