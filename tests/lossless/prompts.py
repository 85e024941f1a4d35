"""Prompts of our own: text that repeats and text that does not. Short, because most of a test's time is theirs."""

EDIT = """Rename `total` to `amount`:
```python
def invoice(items):
    total = sum(items)
    return total
```"""

SUMMARIZE = """Summarize: The lighthouse on Skerry Point was lit in 1871. Its keeper, Marta Lind, \
wrote down the weather every evening."""

EXTRACT = """List as JSON with the keys name, city and age:
Ada Moss, Lisbon, 36. Ben Okafor, Nairobi, 41. Chen Li, Oslo, 29."""

WRITE = "Write a short poem about a bicycle."

REPEAT = "Repeat three times: the quick brown fox jumps over the lazy dog."

PROMPTS = {"edit": EDIT, "summarize": SUMMARIZE, "extract": EXTRACT, "write": WRITE, "repeat": REPEAT}
