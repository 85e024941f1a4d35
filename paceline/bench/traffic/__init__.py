"""Traffic for measurements: workloads and arrivals."""
