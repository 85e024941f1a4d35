"""`paceline tune`: the drafting that gives the most tokens per second on given traffic."""
