"""`paceline tune`: the drafting method with the most tokens per second on given traffic."""
