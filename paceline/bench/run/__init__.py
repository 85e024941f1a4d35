"""`paceline bench run`: drafting methods, or servers, on workloads, compared in turns."""
