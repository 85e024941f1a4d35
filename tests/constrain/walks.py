"""Random texts of a grammar, and grammars to try."""

from __future__ import annotations

import random

import numpy as np

from paceline.constrain import Constraint, GrammarCompiler, StructuredOutputsParams
from paceline.core.arrays import BoolArray
from paceline.core.token_masks import unpacked
from tests.constrain.tokenizers import PieceTokenizer

TOKENIZER = PieceTokenizer()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)

CALL = {
    "type": "object",
    "properties": {
        "name": {"const": "triangle_area"},
        "arguments": {
            "type": "object",
            "properties": {
                "base": {"type": "integer"},
                "unit": {"enum": ["cm", "mm", "abc"]},
                "note": {"type": "string", "maxLength": 6},
            },
            "required": ["base", "unit"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
GRAMMARS = {
    "call": StructuredOutputsParams(json=CALL),
    "any object": StructuredOutputsParams(json_object=True),
    "list": StructuredOutputsParams(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 4}),
    "with white space": StructuredOutputsParams(json=CALL, whitespace_pattern="[ \n]{0,2}"),
    "regex": StructuredOutputsParams(regex="(ab|abc)+(yes|no)?"),
    "choice": StructuredOutputsParams(choice=["yes", "no", "not", "abc ab", "triangle_area", "é"]),
    "lark": StructuredOutputsParams(grammar='start: "<tool>" call+\ncall: "(" ("a" | "b" call) ")"'),
    "gbnf": StructuredOutputsParams(grammar='root ::= "yes" | "[" root "]"'),
    "embedded": StructuredOutputsParams(grammar='start: "<tool>" j "\\n"\nj: %json {"enum": ["abc", true]}'),
}


def start(name: str, ignore_eos: bool = False) -> Constraint:
    return COMPILER.compile(GRAMMARS[name]).start(ignore_eos)


def allowed(constraint: Constraint) -> BoolArray:
    """Whether each id may come next: bool [vocab]."""
    return unpacked(constraint.packed_mask(), TOKENIZER.vocab_size)


def choices(constraint: Constraint) -> list[int]:
    return np.flatnonzero(allowed(constraint)).tolist()


def random_text(constraint: Constraint, seed: int, most: int = 60) -> list[int]:
    """Tokens that the constraint allows one after the other, to the end of the text or to `most`."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < most and not (tokens and tokens[-1] in TOKENIZER.eos_ids):
        token = rng.choice(choices(constraint))
        constraint.advance(token)
        tokens.append(token)
    return tokens
