"""Is `auto` never slower than off, close to the best fixed setting, and quick to follow a change?"""
