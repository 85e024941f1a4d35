"""`paceline check`: this machine, what paceline selected for it, and self-tests."""
