"""GrammarCompiler: what is refused and why, and what is cached."""

from __future__ import annotations

import json
import sys
import threading

import pytest

from paceline.constrain import GrammarCompiler, GrammarLimits, StructuredOutputsParams, compiler
from paceline.errors import GrammarError, RequestError
from tests.constrain.tokenizers import PieceTokenizer
from tests.constrain.walks import CALL, COMPILER, GRAMMARS, TOKENIZER, random_text


def compile_json(schema: object) -> None:
    COMPILER.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
        (
            {"json": {"not": {"type": "string"}}},
            'JSON schema has "not", which is not supported. Leave it out',
        ),
        ({"json": {"type": "string", "format": "shoe-size"}}, "shoe-size"),
        ({"json": {"type": "dict"}}, "^the JSON schema cannot be compiled: Invalid type: dict. Correct it"),
        ({"json": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}, "oneOf"),
        ({"json": {"$ref": "https://example.com/schema"}}, "example.com"),
        ({"json": "{"}, "is not JSON"),
        ({"json": "true"}, "must be an object"),
        ({"json": {"const": {1, 2}}}, "is not JSON"),
        ({"json": {"multipleOf": 0}}, "multipleOf must be a number above 0"),
        ({"json": {"x-guidance": {"lenient": True}}}, "Use whitespace_pattern instead"),
        ({"json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "nsatisfiable"),
        ({"json": {"$ref": "#"}}, "allows no text"),
        ({"json_object": True, "whitespace_pattern": "("}, "cannot be compiled"),
        ({"regex": "("}, r"^the regular expression cannot be compiled: .*unclosed group.* Correct it"),
        ({"regex": "(?=a)b"}, "cannot be compiled"),
        ({"grammar": "start: nothing"}, "^the grammar cannot be compiled: .*unknown name"),
        ({"grammar": "root ::= ("}, "GBNF|compiled"),
        ({"grammar": "no grammar at all"}, "Check its syntax"),
        ({"grammar": "start: a\na: b\nb: a"}, "allows no text"),
        ({"grammar": "start: %json 5x"}, "must be an object"),
        ({"grammar": "start: %json"}, "not followed by a JSON schema"),
        ({"grammar": 'start: %json {"uniqueItems": true, "type": "array"}'}, "uniqueItems"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_named(params, message):
    with pytest.raises(RequestError, match=message) as refusal:
        COMPILER.compile(StructuredOutputsParams(**params))
    assert len(str(refusal.value)) < 600


def test_annotations_of_a_schema_constrain_nothing():
    compile_json(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "t", "description": "d", **CALL}
    )


def test_a_schema_may_be_text_and_order_of_properties_is_kept():
    as_text = COMPILER.compile(StructuredOutputsParams(json=json.dumps(CALL)))
    assert as_text is COMPILER.compile(StructuredOutputsParams(json=CALL))
    turned = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}, "required": ["a", "b"]}
    run = COMPILER.compile(StructuredOutputsParams(json=turned)).start().forced()
    assert TOKENIZER.decode(run).startswith('{"b": 1, "a": 2')


def test_what_was_compiled_is_kept_and_the_least_recently_used_goes_first(monkeypatch):
    monkeypatch.setattr(compiler, "CACHED_GRAMMARS", 2)
    own = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    first, second, third = (StructuredOutputsParams(choice=[word]) for word in ("a", "b", "c"))
    kept = own.compile(first)
    own.compile(second)
    assert own.compile(first) is kept
    own.compile(third)  # the second goes
    assert own.compile(first) is kept
    monkeypatch.setattr(compiler, "CACHED_BYTES", 0)
    own.compile(second)
    assert own.compile(first) is not kept


def test_many_threads_compile_each_grammar_once():
    own = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
    found: dict[str, set[int]] = {name: set() for name in GRAMMARS}

    def work() -> None:
        for name, params in GRAMMARS.items():
            found[name].add(id(own.compile(params)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {len(grammars) for grammars in found.values()} == {1}


class SpaceFirst(PieceTokenizer):
    """Puts a space before a text, as sentencepiece does."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(" " + text, add_special_tokens)


class Unfaithful(PieceTokenizer):
    """Its tokens spell another text than the one it was given."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return super().encode(text.upper(), add_special_tokens)


@pytest.mark.parametrize("kind", [PieceTokenizer, SpaceFirst, Unfaithful])
def test_forced_tokens_spell_what_is_forced_whatever_the_tokenizer_makes_of_a_text(kind):
    own = GrammarCompiler(kind(), kind.vocab_size)
    for word in ("triangle_area yes", " abc", "<eos>no"):
        run = own.compile(StructuredOutputsParams(choice=[word])).start().forced()
        assert run[-1] == 0
        assert TOKENIZER.decode(run) == word


def test_without_the_library_a_request_is_reported_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match=r"pip install 'paceline\[serve\]'"):
        GrammarCompiler(PieceTokenizer(), 400).compile(StructuredOutputsParams(regex="a"))


class Endless(PieceTokenizer):
    """Nothing ends a text."""

    eos_ids = frozenset()


def test_a_model_that_cannot_end_a_text_follows_no_grammar():
    own = GrammarCompiler(Endless(), Endless.vocab_size)
    own.prepare()
    with pytest.raises(RequestError, match="needs a model with an end-of-sequence token"):
        own.compile(StructuredOutputsParams(regex="a"))


def test_a_grammar_that_a_request_has_used_up_is_compiled_again():
    """Requests of one grammar share its automaton, whose size is limited. The next is not to inherit it."""
    tight = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size, GrammarLimits(max_lexer_states=60))
    params = StructuredOutputsParams(regex=r"(\w+\s*){1,500}\p{L}{1,500}")
    grammar = tight.compile(params)
    with pytest.raises(GrammarError, match="too many states"):
        random_text(grammar.start(), 1, most=400)
    again = tight.compile(params)
    assert again is not grammar
    assert again.start().packed_mask().any()
