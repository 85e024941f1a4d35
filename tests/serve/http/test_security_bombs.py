"""Bombs: grammars, parameters, bodies and tokens that would take a server down; see also test_security.py."""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.constrain import compiler
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.serve import service
from tests.constrain.tokenizers import PieceTokenizer
from tests.engines import new_engine
from tests.serve.running import Client, read_answer, serving
from tests.toy import VOCAB, ToyBackend


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as made:
        yield made


def refused(client: Client, **fields: object) -> str:
    """The message of the 400 that a completion with these fields must get."""
    answer = client.complete(**fields)
    assert answer.status == 400, (fields, answer.body)
    return answer.message


# Grammars and regular expressions -------------------------------------------------------------------------


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


BOMBS: dict[str, dict[str, Any]] = {
    "deep": {"json": nested(45)},
    "wide": {"json": {"enum": [str(number) for number in range(30_000)]}},
    "large": {"json": json.dumps({"const": "a" * 200_000})},
    "cyclic": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "from elsewhere": {"json": {"$ref": "http://192.0.2.1/schema.json"}},
    "from a file": {"json": {"$ref": "file:///etc/passwd"}},
    "unclosed": {"regex": "("},
    "looking ahead": {"regex": "(?=a)b"},
    "a long expression": {"regex": "a" * 10_000},
    "a pattern in a schema": {"json": {"type": "string", "pattern": "(?<!a)b"}},
    "many choices": {"choice": [str(number) for number in range(5000)]},
    "no choice": {"choice": []},
    "no rule": {"grammar": "start: nowhere"},
    "many rules": {
        "grammar": "start: a0\n" + "\n".join(f"a{n}: a{n + 1}" for n in range(600)) + '\na600: "b"'
    },
    "two at once": {"regex": "a", "json": {}},
    "unknown": {"lua": "os.exit()"},
    "not supported": {"json": {"type": "object", "if": {}, "then": {}}},
    "no schema": {"json": 5},
}


@pytest.fixture(scope="module")
def grammar_engine() -> Engine:
    tokenizer = PieceTokenizer()
    limits = Limits(tokenizer.vocab_size, 256, 16, 64)
    return new_engine(ToyBackend(max_rows=64, vocab=tokenizer.vocab_size), tokenizer, limits, num_pages=200)


@pytest.mark.parametrize("bomb", BOMBS)
def test_grammar_and_regex_bombs_are_refused(client: Client, bomb: str) -> None:
    assert refused(client, structured_outputs=BOMBS[bomb])
    assert client.get("/health").status == 200


def test_grammars_are_compiled_beside_the_event_loop(grammar_engine: Engine, monkeypatch: Any) -> None:
    """While one is compiled, however long it takes, the server answers others."""
    begun, go_on = threading.Event(), threading.Event()
    compile_grammar = grammar_engine.grammars.compile

    def slow(structure: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return compile_grammar(structure, **options)

    with serving(grammar_engine) as client:
        monkeypatch.setattr(grammar_engine.grammars, "compile", slow)
        with client.connect() as waiting:
            body = {"prompt": "hello", "structured_outputs": {"regex": "[a-c]{3}"}}
            waiting.sendall(client.request("POST", "/v1/completions", body))
            assert begun.wait(30)
            assert client.complete(max_tokens=3).status == 200
            assert client.get("/health").status == 200
            go_on.set()
            answer = read_answer(waiting)
    assert answer.status == 200
    assert re.fullmatch("[a-c]{3}", answer.json["choices"][0]["text"])


def test_a_grammar_travels_with_its_request(grammar_engine: Engine, monkeypatch: Any) -> None:
    """Even if it leaves the cache before the request is taken, the engine's thread compiles nothing."""
    compile_grammar = grammar_engine.grammars.compile
    threads: list[str] = []

    def compile_here(structure: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_grammar(structure, **options)

    monkeypatch.setattr(compiler, "CACHED_GRAMMARS", 0)
    with serving(grammar_engine) as client:
        monkeypatch.setattr(grammar_engine.grammars, "compile", compile_here)
        answer = client.complete(n=2, structured_outputs={"regex": "[a-c]{3}"})
    assert answer.status == 200
    assert len(threads) == 1
    assert threads[0].startswith("paceline-serve")


def test_requests_whose_grammars_wait_too_long_get_429(grammar_engine: Engine, monkeypatch: Any) -> None:
    compile_grammar = grammar_engine.grammars.compile
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slow(structure: Any, **options: Any) -> Any:
        begun.release()
        assert go_on.wait(30)
        return compile_grammar(structure, **options)

    monkeypatch.setattr(service, "COMPILER_WAIT", 0.05)
    with serving(grammar_engine) as client:
        monkeypatch.setattr(grammar_engine.grammars, "compile", slow)
        held = [client.connect() for _ in range(service.COMPILERS)]
        body = {"prompt": "hello", "structured_outputs": {"regex": "[a-c]{3}"}}
        for connection in held:
            connection.sendall(client.request("POST", "/v1/completions", body))
            assert begun.acquire(timeout=30)
        answer = client.post("/v1/completions", body)
        assert answer.status == 429
        assert "retry-after" in answer.headers
        go_on.set()
        assert [read_answer(connection).status for connection in held] == [200] * len(held)


# Parameters ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("n", value) for value in (0, -1, 10**9, 1.5, "2", True)),
        *(("temperature", value) for value in (math.nan, math.inf, -math.inf, -1, 10**400, "hot")),
        *(("top_p", value) for value in (math.nan, 0, 1.1)),
        *(("top_k", value) for value in (-2, 2**63, 1.5)),
        *(("min_p", value) for value in (math.nan, 2)),
        *(("repetition_penalty", value) for value in (math.nan, 0, -1, 10**9)),
        *(("presence_penalty", value) for value in (math.nan, 3)),
        *(("frequency_penalty", value) for value in (math.inf, -3)),
        *(("max_tokens", value) for value in (-1, 10**30, 1.5)),
        *(("min_tokens", value) for value in (-1, 10**30)),
        *(("logprobs", value) for value in (-1, 10**6)),
        *(("prompt_logprobs", value) for value in (-1, 10**6)),
        *(("seed", value) for value in (2**70, 1.5)),
        *(("stop", value) for value in (["a"] * 10_000, ["a" * 10**5], [""], 5)),
        *(("stop_token_ids", value) for value in ([1] * 10_000, [-1])),
        *(("logit_bias", value) for value in ({str(n): 1 for n in range(5000)}, {"5": math.nan}, {"x": 1})),
        *(("prompt", value) for value in ("", [], [[]], [""], ["a"] * 5000, None, 5, {"a": 1}, "a" * 10**6)),
        *(("best_of", value) for value in (10**9,)),
        *(("speculative", value) for value in ("fast", {"num_speculative_tokens": 10**9}, {"depth": -1}, 5)),
        *(("segment", value) for value in ("a" * 10**4, 5)),
        *(("cache_salt", value) for value in ("a" * 10**4, 5)),
        *(("stream_options", value) for value in ({"include_usage": "often"}, {"unknown": True})),
    ],
)
def test_parameter_bombs_are_refused_by_name(client: Client, field: str, value: object) -> None:
    answer = client.post("/v1/completions", {"prompt": "hello", field: value})
    assert answer.status == 400
    param = answer.json["error"]["param"] or ""
    assert field in answer.message or param.split(".")[0] in (field, "body")


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"5", b"null", b'"a"', b"\xff\xfe", b"{" * 10**5, b'{"prompt": "\\ud800"}'),
        *(b"[" * 10**5 + b"]" * 10**5, b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a", "n": 1e999}'),
        b'{"prompt": "a", "n": ' + b"1" * 10**5 + b"}",
    ],
)
def test_ambiguous_json_is_refused(client: Client, body: bytes) -> None:
    assert client.post("/v1/completions", body).status == 400


# Tokens outside the vocabulary ----------------------------------------------------------------------------


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31, 2**63, -(2**63)])
def test_a_token_outside_the_vocabulary_is_refused_wherever_it_comes(client: Client, token: int) -> None:
    refused(client, prompt=[2, token])
    refused(client, prompt=[[2], [token]])
    refused(client, stop_token_ids=[token])
    refused(client, logit_bias={str(token): 1})
    assert client.post("/detokenize", {"tokens": [token]}).status == 400


def test_a_token_outside_the_vocabulary_is_never_chosen(client: Client) -> None:
    """The last id is followed by nothing: no padding of a tile wins, whatever the bias."""
    bias = {str(token): -100 for token in range(VOCAB - 1)}
    answer = client.complete(max_tokens=5, temperature=1.5, seed=1, logit_bias=bias, logprobs=5)
    assert answer.status == 200
    assert answer.json["usage"]["completion_tokens"] == 5
