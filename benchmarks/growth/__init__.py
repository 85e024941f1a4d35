"""How the cost of a pass grows with context, requests, tree and prompt, beside what the machine allows."""
