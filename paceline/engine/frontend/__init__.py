"""The engine behind an event loop: its thread, its clients, their streams."""
