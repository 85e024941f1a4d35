"""`paceline readiness`: what to check before speculation is switched on, with a verdict for each line."""
