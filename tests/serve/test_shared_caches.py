"""What one client can learn about another from the caches: nothing, if their salts or keys differ.

The attacker knows that the victim sent, or was answered, one of two texts. It sends the beginning of each,
makes the model generate the next token, and compares how much was drafted, or found in the prefix cache,
for each of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from typing import Any

import pytest

from paceline.core.params import SamplingParams
from paceline.draft.base import Drafter
from paceline.draft.hybrid import HybridDrafter, HybridOptions
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from paceline.engine.engine import Engine
from tests.serve.running import Client, serving
from tests.toy import drain, toy_engine

KEYS = ("sk-ann", "sk-eve")
LENGTH = 11  # tokens of a secret
PAIRS = [[[*range(text, 88 + text, 8)] for text in (pair, pair + 4)] for pair in range(4)]  # no token twice
TRUE = (0, 1, 1, 0)  # index of the text that the victim sends, of each pair
KNOWN = 7  # tokens of a guess that the attacker sends; it makes the model generate the next one


def make_engine(method: str, share: str = "responses") -> Engine:
    """An engine that drafts from past text."""
    drafter: Drafter = NgramDrafter(NgramDrafter.Options())
    if method == "suffix":
        drafter = SuffixDrafter(SuffixOptions(share_suffix_cache=share))
    elif method == "hybrid":
        options = HybridOptions(share_suffix_cache=share, fallback={"method": "ngram"})
        drafter = HybridDrafter(options, SuffixDrafter(options), drafter, 4)
    return toy_engine(drafter=drafter, budget=4, branching=1)


@functools.cache
def answer_to(prompt: tuple[int, ...]) -> list[int]:
    """The model's answer: it is public, so the attacker knows it."""
    engine = toy_engine()
    (request,) = engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True))
    drain(engine)
    return request.output_token_ids


def say(client: Client, key: str | None = None, **fields: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.post("/v1/completions", {"temperature": 0, "ignore_eos": True, **fields}, **headers).json


def send_secrets(client: Client, of: str, key: str | None = None, **fields: Any) -> None:
    """Let the victim send the true text of each pair, or a prompt that is answered with it."""
    for pair, true in zip(PAIRS, TRUE, strict=True):
        most = LENGTH if of == "answers" else 1
        said = say(client, prompt=pair[true], max_tokens=most, key=key, **fields)
        assert said["usage"]["completion_tokens"] == most


def guess(client: Client, of: str, key: str | None = None, **fields: Any) -> list[list[Any]]:
    """All that the attacker sees about both guesses of each secret, except times."""
    seen = []
    for pair in PAIRS:
        texts = pair if of == "prompts" else [answer_to(tuple(prompt)) for prompt in pair]
        answers = [
            say(
                client,
                prompt=text[:KNOWN],
                logit_bias={str(text[KNOWN]): 100.0},
                max_tokens=3,
                return_metrics=True,
                key=key,
                **fields,
            )
            for text in texts
        ]
        seen.append(
            [
                (
                    answer["choices"][0]["text"],
                    answer["usage"],
                    answer["metrics"]["speculative_decoding"],
                )
                for answer in answers
            ]
        )
    return seen


def secrets_found(seen: list[list[Any]], unaware: list[list[Any]]) -> int:
    """Secrets found, if the attacker believes the guess with more drafts than without the victim."""
    found = 0
    for both, before, true in zip(seen, unaware, TRUE, strict=True):
        more = [
            own["num_draft_tokens"] - usual["num_draft_tokens"]
            for (*_, own), (*_, usual) in zip(both, before, strict=True)
        ]
        found += more[true] > more[1 - true]
    return found


@functools.cache
def seen_without_victim(method: str, share: str, of: str) -> list[list[Any]]:
    """What the attacker sees on a server that the victim never used."""
    with serving(make_engine(method, share)) as client:
        return guess(client, of)


@pytest.mark.parametrize("of", ["prompts", "answers"])
@pytest.mark.parametrize("method", ["suffix", "hybrid"])
def test_nothing_reveals_requests_of_another_salt(method: str, of: str) -> None:
    """Not even if ends of prompts are cached: everything is as on a server that the victim never used."""
    unaware = seen_without_victim(method, "prompts", of)
    with serving(make_engine(method, "prompts")) as client:
        send_secrets(client, of, cache_salt="ann")
        assert guess(client, of, cache_salt="eve") == unaware
        assert guess(client, of) == unaware
        assert secrets_found(guess(client, of, cache_salt="ann"), unaware) > len(PAIRS) / 2, (
            "the attack must be one"
        )


@pytest.mark.parametrize("of", ["prompts", "answers"])
def test_nothing_reveals_requests_with_another_key(of: str) -> None:
    """Sending the victim's salt does not help the attacker either."""
    unaware = seen_without_victim("suffix", "prompts", of)
    with serving(make_engine("suffix", "prompts"), api_key=KEYS) as client:
        send_secrets(client, of, "sk-ann")
        send_secrets(client, of, "sk-ann", cache_salt="ann")
        assert guess(client, of, "sk-eve") == unaware
        assert guess(client, of, "sk-eve", cache_salt="ann") == unaware
        assert secrets_found(guess(client, of, "sk-ann"), unaware) > len(PAIRS) / 2


def test_keys_may_share_caches() -> None:
    with serving(make_engine("suffix"), api_key=KEYS, share_cache_across_keys=True) as client:
        send_secrets(client, "answers", "sk-ann")
        seen = guess(client, "answers", "sk-eve")
        assert secrets_found(seen, seen_without_victim("suffix", "responses", "answers")) > len(PAIRS) / 2
        assert cached(client, "sk-ann") == 0
        assert cached(client, "sk-eve") > 0


def test_one_key_separates_nothing_so_its_requests_find_what_has_no_salt() -> None:
    """Such as answers that were kept by --learn, or in a file of past responses, before a restart."""
    drafter = SuffixDrafter(SuffixOptions())
    engine = toy_engine(drafter=drafter, budget=4, branching=1)
    for pair, true in zip(PAIRS, TRUE, strict=True):
        drafter.memory.remember(pair[true], answer_to(tuple(pair[true])))
    with serving(engine, api_key=KEYS[:1]) as client:
        seen = guess(client, "answers", "sk-ann")
        assert secrets_found(seen, seen_without_victim("suffix", "responses", "answers")) > len(PAIRS) / 2


def test_each_key_has_its_own_prefix_cache() -> None:
    with serving(api_key=KEYS) as client:
        assert cached(client, "sk-ann") == 0
        assert cached(client, "sk-eve") == 0
        assert cached(client, "sk-ann") > 0
        assert cached(client, "sk-ann", cache_salt="a") == 0


def cached(client: Client, key: str, **fields: Any) -> int:
    """Tokens of a long prompt that were found in the prefix cache."""
    usage = say(client, key, prompt="a prompt of several pages, which others may guess", **fields)["usage"]
    count: int = usage["prompt_tokens_details"]["cached_tokens"]
    return count


@pytest.mark.parametrize(
    ("method", "share", "of"),
    [
        ("suffix", "responses", "prompts"),
        ("hybrid", "responses", "prompts"),
        ("suffix", "off", "answers"),
        ("ngram", "", "answers"),  # looks at a request's own text only
    ],
)
def test_what_is_not_cached_is_not_revealed(method: str, share: str, of: str) -> None:
    """Not even to requests of the same salt, except by the prefix cache."""
    with serving(make_engine(method, share)) as client:
        send_secrets(client, of)
        seen = guess(client, of)
    drafted, usual = (
        [(text, metrics) for both in found for text, _, metrics in both]
        for found in (seen, seen_without_victim(method, share, of))
    )
    assert drafted == usual


def test_the_salt_of_a_key_reveals_nothing_and_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    salts: list[str] = []
    for _ in range(2):  # another process draws other salts
        engine = toy_engine()
        submit = engine.add_request
        engine.add_request = lambda *args, submit=submit, **options: (  # type: ignore[method-assign]
            salts.append(options["cache_salt"]) or submit(*args, **options)
        )
        with serving(engine, api_key=KEYS) as client:
            for key in KEYS:
                for fields in ({}, {"cache_salt": "mine"}):
                    say(client, key, prompt="hello", max_tokens=1, **fields)
    assert len(set(salts)) == 8
    for plain, salted in zip(salts[::2], salts[1::2], strict=True):
        assert salted == plain + "mine"
        assert len(plain) == len(salts[0])
    logged = json.dumps([[record.getMessage(), getattr(record, "facts", {})] for record in caplog.records])
    assert '"status": 200' in logged
    for salt in salts:
        assert salt not in logged
        assert not any(key in salt or digest(key) in salt for key in KEYS)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]
