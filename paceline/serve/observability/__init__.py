"""What a server shows of itself: health, logs, metrics, traces, the live page."""
