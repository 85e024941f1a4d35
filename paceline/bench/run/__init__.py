"""`paceline bench run`: drafting methods or servers compared on workloads, in turns."""
