"""What is asked, and when: workloads and arrivals."""
