"""The planner: from forecasts and prices to plans, for passes through the host and on the device."""
