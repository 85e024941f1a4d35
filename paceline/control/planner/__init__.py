"""The planner: from forecasts and costs to plans, for passes through the host and on the device."""
