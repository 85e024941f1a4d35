"""Whether a candidate head gains, by held-back answers and by live steps; the heads that have served."""
