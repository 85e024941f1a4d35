"""The real engine, scheduler and controller around a simulated model: see docs/guides/simulate.md."""
