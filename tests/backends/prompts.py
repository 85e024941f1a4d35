"""Twenty prompts of many kinds, for tests on real models."""

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "SELECT name, COUNT(*) FROM orders",
    'Translate to German: "Good morning, how are you?"\n',
    "1, 1, 2, 3, 5, 8, 13,",
    "Q: Why do leaves change colour in autumn?\nA:",
    '{"name": "Ada", "age": 36, "languages": [',
    "# Shopping list\n\n- apples\n- bread\n-",
    "Dear Sir or Madam,\n\nI am writing to",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
    "Water boils at 100 degrees Celsius because",
    "for (int i = 0; i < n; i++) {",
    "Les trois mousquetaires est un roman",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "Step 1: Preheat the oven to 180 °C.\nStep 2:",
    "import numpy as np\n\nx = np.linspace(0, 1, 100)\n",
    "😀 Emoji are small pictures that",
    "If x + 3 = 10, then x =",
    "In 1969, the first humans",
)
