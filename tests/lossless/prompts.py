"""Prompts of our own: text that repeats and text that does not."""

EDIT = """Rename `total` to `amount` and change nothing else.
```python
def invoice(items):
    total = 0
    for item in items:
        total += item.price
    return total
```"""

SUMMARIZE = """Summarize: The lighthouse on Skerry Point was lit for the first time in 1871. Its keeper, \
Marta Lind, wrote down the weather every evening for thirty-four years. Her notebooks are kept there."""

EXTRACT = """Write as a JSON list of objects with the keys name, city and age.
Ada Moss lives in Lisbon and is 36. Ben Okafor lives in Nairobi and is 41. Chen Li lives in Oslo and is 29."""

WRITE = "Write a short poem about a bicycle that dreams of the sea."

REPEAT = "Repeat this three times: the quick brown fox jumps over the lazy dog, and the dog does not mind."

PROMPTS = {"edit": EDIT, "summarize": SUMMARIZE, "extract": EXTRACT, "write": WRITE, "repeat": REPEAT}
