"""Is `auto` never slower than off, near the best fixed setting, and quick to follow a change?"""
