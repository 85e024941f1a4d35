"""A thousand varied strings: hand-written traps, and seeded mixtures of everything people type."""

from __future__ import annotations

import random

HAND_WRITTEN = [
    "",
    " ",
    "\n",
    "\t\t\t",
    "a\n\n1. b\n\n2. c",
    "x    12   345\n\n\n6",
    "Hello, world! It's 1999's best-of; we'LL see, they'D go.",
    "👋🏽👨‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "日本語のテキスト、中文字符。한국어",
    "שלום עולם مرحبا بالعالم",
    "e\u0301 n\u0303 Z\u0335\u0341a\u0334\u0348lgo",
    "ﬀﬁ ① ² ½ Ⅻ ٣٤٥ ४५६",
    "\u00a0\u2003\u3000\u200b\ufeff\u2028\u2029\u0085",
    "\x00\x01\x02\x04\x06\x13\x1b[31m\x7f",
    "\ufffd\ufffe\uffff\U0010ffff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|><|im_start|><|im_end|>  <|endoftext|>",
    "<|im_start |> <|im_end <|endoftext|",
    '<tool_call>\n{"name": "f"}\n</tool_call><|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>',
    "[PAD151665] <repo_name>x<file_sep><gh_stars>",
    "def f(x):\n    return {'a': [1, 2.5e-3, 0xFF], \"b\": x ** 2}  # done\n\n\n",
    "\r\n\r\n  \r text\r",
    "https://example.org/a?b=c&d=%20#e  user@example.org",
    "a" * 500,
    " " * 300 + "x",
    "'s 't 're 've 'm 'll 'd 'S 'T ''''",
]
BROKEN = ["\ud800", "a\udfffb", "\ud83d\ude00", "<|im_end\ud800|>", "\udc80 \udcff"]

PIECES = [
    *[
        "the",
        "The",
        "speculative",
        "decoding",
        "naïve",
        "Straße",
        "don't",
        "we'll",
        "I'M",
        "1",
        "42",
        "2026",
        "3.14",
    ],
    *[
        " ",
        "  ",
        "    ",
        "\n",
        "\n\n",
        "\t",
        "\r\n",
        "\u00a0",
        "\u3000",
        ".",
        ",",
        "...",
        "!?",
        "--",
        "(",
        ")",
        "{}",
    ],
    *[
        "=>",
        "!=",
        "::",
        "/*",
        "#",
        "_",
        "__init__",
        "camelCase",
        "SCREAMING_CASE",
        "for i in range(10):",
        "x += 1;",
    ],
    *[
        "日本",
        "語",
        "的",
        "한국",
        "мир",
        "Ελλάς",
        "שלום",
        "عالم",
        "हिन्दी",
        "ไทย",
        "\u0301",
        "\u0308",
        "\u200d",
        "\ufe0f",
    ],
    *[
        "😀",
        "👩‍💻",
        "🇫🇷",
        "🏽",
        "½",
        "²",
        "Ⅷ",
        "٣",
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<tool_call>",
        "<|",
    ],
]


def varied_strings(count: int = 1000) -> list[str]:
    """Always the same `count` strings: the hand-written ones, mixtures of pieces, random characters."""
    source = random.Random(2026)
    strings = list(HAND_WRITTEN)
    while len(strings) < count:
        if source.random() < 0.75:
            text = "".join(source.choices(PIECES, k=source.randint(1, 40)))
        else:
            text = "".join(_character(source) for _ in range(source.randint(1, 60)))
        strings.append(text)
    return strings


def _character(source: random.Random) -> str:
    first, last = source.choice(
        [(0, 0x7F), (0x80, 0x24F), (0x250, 0xD7FF), (0xE000, 0xFFFF), (0x1F300, 0x1FAFF)]
    )
    return chr(source.randint(first, last))
