"""What a constraint allows and forces is a pure function of the tokens so far."""

from __future__ import annotations

import json
import random
import re

import jsonschema
import numpy as np
import pytest

from paceline.constrain import StructuredOutputsParams
from paceline.constrain.constraint import MAX_FORCED
from paceline.errors import GrammarError
from tests.constrain.walks import CALL, COMPILER, GRAMMARS, TOKENIZER, allowed, choices, random_text, start

ENDS = sorted(TOKENIZER.eos_ids)


def after(name: str, tokens: list[int]):
    constraint = start(name)
    for token in tokens:
        constraint.advance(token)
    return constraint


def view(constraint) -> tuple[tuple[int, ...], list[int]]:
    return constraint.forced(), choices(constraint)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_constraint_depends_only_on_the_tokens_so_far(name):
    """Asked or not, branched or not, in any order: each place of a text looks the same from everywhere."""
    for seed in range(3):
        tokens = random_text(start(name), seed)
        followed = start(name)
        seen = []
        for token in tokens:
            seen.append(view(followed))
            followed.advance(token)
        silent = start(name)
        twins = []
        for token in tokens:
            twins.append(silent.branch())  # not asked before the next token, nor is the original
            silent.advance(token)
        for place in random.Random(seed).sample(range(len(tokens)), len(tokens)):
            wandering = twins[place].branch()
            random_text(wandering, seed + 1, most=5)
            assert view(twins[place]) == seen[place] == view(after(name, tokens[:place]))


@pytest.mark.parametrize("name", GRAMMARS)
def test_allows_is_the_mask_token_by_token_and_only_what_is_allowed_can_follow(name):
    for seed in range(2):
        tokens = random_text(start(name), seed, most=25)
        for place in range(len(tokens)):
            constraint = after(name, tokens[:place])
            asked_first = constraint.branch()
            single = [asked_first.allows(token) for token in reversed(range(TOKENIZER.vocab_size))]
            mask = allowed(constraint)
            assert single[::-1] == mask.tolist() == [constraint.allows(token) for token in range(len(mask))]
            for token in random.Random(place).sample(range(len(mask)), 20):
                twin = constraint.branch()
                if mask[token]:
                    twin.advance(token)
                else:
                    with pytest.raises(GrammarError):
                        twin.advance(token)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_forced_token_is_the_only_one_allowed(name):
    met = 0
    for seed in range(5):
        constraint = start(name)
        for token in random_text(constraint.branch(), seed):
            forced = constraint.forced()
            met += len(forced) > 0
            assert not forced or choices(constraint) == [forced[0]]
            ahead = constraint.branch()
            for sure in forced:  # the whole run comes, token by token
                assert ahead.forced()[0] == sure
                ahead.advance(sure)
            constraint.advance(token)
    assert met


def test_texts_are_what_the_grammar_says():
    for seed in range(20):
        text = TOKENIZER.decode(random_text(start("call"), seed, most=200))
        jsonschema.validate(json.loads(text), CALL)
        assert re.fullmatch("(ab|abc)+(yes|no)?", TOKENIZER.decode(random_text(start("regex"), seed, 400)))
        assert TOKENIZER.decode(random_text(start("choice"), seed)) in GRAMMARS["choice"].choice
        assert re.fullmatch(r"\[*yes\]*", TOKENIZER.decode(random_text(start("gbnf"), seed, 400)))


def test_every_token_that_can_still_become_a_choice_is_allowed():
    """The mask of a finite language, counted by hand."""
    words = [word.encode() for word in GRAMMARS["choice"].choice]
    spelled = [TOKENIZER.token_bytes(token) for token in range(TOKENIZER.vocab_size)]
    for seed in range(10):
        constraint = start("choice")
        text = b""
        for token in random_text(constraint.branch(), seed):
            if not constraint.forced():
                able = [
                    number
                    for number, piece in enumerate(spelled)
                    if number > 2 and piece and any(word.startswith(text + piece) for word in words)
                ]
                assert choices(constraint) == (ENDS if text in words else []) + able
            constraint.advance(token)
            text += b"" if token in ENDS else spelled[token]


def test_json_is_spelled_with_one_space_after_commas_and_colons():
    constraint = start("call")
    assert TOKENIZER.decode(constraint.forced()).startswith('{"name": "triangle_area", "arguments": {"base":')
    spaced = start("with white space")
    assert not spaced.forced() or TOKENIZER.decode(spaced.forced()) == "{"


def test_forced_runs_are_cut_into_canonical_tokens():
    run = start("call").forced()
    assert list(run) == TOKENIZER.encode(TOKENIZER.decode(run), add_special_tokens=False)


def test_long_runs_come_in_parts():
    word = "abc yes no " * 30
    constraint = COMPILER.compile(StructuredOutputsParams(choice=[word])).start()
    assert len(constraint.forced()) == MAX_FORCED
    assert TOKENIZER.decode(random_text(constraint, 0, most=500)) == word


def test_the_end_is_forced_where_nothing_else_may_follow():
    constraint = COMPILER.compile(StructuredOutputsParams(choice=["yes"])).start()
    assert constraint.forced() == (*TOKENIZER.encode("yes", add_special_tokens=False), 0)
    for token in constraint.forced():
        constraint.advance(token)
    with pytest.raises(GrammarError):
        constraint.packed_mask()
    with pytest.raises(GrammarError):
        constraint.advance(0)


def test_every_end_is_allowed_where_the_text_may_end_unless_the_end_is_ignored():
    for ignore_eos in (False, True):
        constraint = start("regex", ignore_eos)
        for token in TOKENIZER.encode("ab", add_special_tokens=False):
            constraint.advance(token)
        assert set(ENDS).issubset(choices(constraint)) is not ignore_eos
        for token in TOKENIZER.encode("yes", add_special_tokens=False):
            constraint.advance(token)
        assert constraint.forced() == (0,)


def test_ids_without_a_token_and_special_tokens_are_never_allowed():
    anything = COMPILER.compile(StructuredOutputsParams(regex="(?s:.)*")).start()
    mask = allowed(anything)
    assert len(mask) == TOKENIZER.vocab_size
    spelled = np.array([bool(TOKENIZER.token_bytes(token)) for token in range(len(mask))])
    assert not mask[~spelled].any()
    assert choices(anything)[:3] == [*ENDS, 3]  # not 2, which begins a text


def test_the_spelling_of_a_special_token_is_text_like_any_other():
    constraint = COMPILER.compile(StructuredOutputsParams(choice=["ab<eos>ab<bos>"])).start()
    tokens = random_text(constraint, 0)
    assert 0 not in tokens[:-1]
    assert TOKENIZER.decode(tokens) == "ab<eos>ab<bos>"
