"""The real engine, scheduler and controller over a model that only costs time: see docs/simulate.md."""
