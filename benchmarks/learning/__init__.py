"""Traffic that shifts to another domain and back: what a learning head gains beside a static one."""
