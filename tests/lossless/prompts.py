"""Short prompts of our own: text that repeats and text that does not."""

EDIT = """Rename `total` to `sum`:
```python
total = 0
for item in items:
    total += item.price
return total
```"""

SUMMARIZE = "Summarize: Skerry Point was lit in 1871. Its keeper, Marta Lind, wrote down the weather there."

EXTRACT = "Write as JSON: Ada Moss lives in Lisbon and is 36. Ben Okafor lives in Nairobi and is 41."

WRITE = "Write a short poem about the sea."

REPEAT = "Repeat this three times: the quick brown fox jumps over the lazy dog."

PROMPTS = {"edit": EDIT, "summarize": SUMMARIZE, "extract": EXTRACT, "write": WRITE, "repeat": REPEAT}
