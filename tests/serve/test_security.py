"""What has gone wrong in servers like this one, by class. docs/security.md says what we do about each.

Classes with more to test have files of their own: test_auth.py, test_limits.py, test_logs.py here,
tests/models/ for files, tests/constrain/ for grammars, tests/lossless/test_edges.py for logits.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.engine.admission import Limits
from paceline.engine.engine import Engine
from paceline.serve.connections import MOST_HEAD_BYTES
from paceline.serve.options import ServeOptions
from tests.constrain.tokenizers import PieceTokenizer
from tests.serve.running import Client, read_answer, serving, until
from tests.toy import VOCAB, ToyBackend, scribble_free_pages, toy_engine

SOURCES = Path(paceline.__file__).parent
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as made:
        yield made


def refused(client: Client, path: str = "/v1/completions", **fields: object) -> str:
    """The message of the 400 that these fields must get."""
    body = {"messages": HELLO} if "chat" in path else {"prompt": "hello"}
    answer = client.post(path, {**body, **fields})
    assert answer.status == 400, (fields, answer.body)
    return answer.message


# Pickle and sockets between processes -------------------------------------------------------------------


@functools.cache
def imports_and_calls() -> list[tuple[str, str, ast.AST]]:
    """(file, dotted name, node) of everything that our sources import or call."""
    found: list[tuple[str, str, ast.AST]] = []
    for source in SOURCES.rglob("*.py"):
        place = str(source.relative_to(SOURCES))
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                found += [(place, alias.name, node) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(place, f"{node.module}.{alias.name}", node) for alias in node.names]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                found.append((place, ast.unparse(node.func), node))
    return found


def used(pattern: str) -> list[tuple[str, ast.AST]]:
    """Where our sources import or call a name that begins like this."""
    return [
        (f"{place}: {name}", node) for place, name, node in imports_and_calls() if re.match(pattern, name)
    ]


def test_no_pickle_and_no_sockets_between_processes() -> None:
    unsafe = r"(pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib|multiprocessing|zmq|xmlrpc|yaml)\b"
    assert used(unsafe) == []
    # the one socket that is bound is the server's own
    bound = [
        place for place, _ in used(r".*(\.listen|listener\.bind|create_server|start_server|unix_server)$")
    ]
    assert bound == ["serve/server.py: listener.bind"]
    assert [place for place, _ in used(r"socket\.socket$")] == ["serve/server.py: socket.socket"]


def test_the_server_listens_on_loopback_unless_told_otherwise() -> None:
    assert ServeOptions().host == "127.0.0.1"


# Code in checkpoints ------------------------------------------------------------------------------------


def test_no_code_is_loaded_from_checkpoints() -> None:
    assert used(r"torch\.(load|jit\.load|hub\.)") == []
    for place, node in used(r"(np|numpy)\.load$"):
        assert isinstance(node, ast.Call)
        allowed = {word.arg: ast.unparse(word.value) for word in node.keywords}
        assert allowed["allow_pickle"] == "False", place
    for place, node in used(r".*from_pretrained$|.*hf_hub|.*snapshot_download"):
        assert isinstance(node, ast.Call)
        assert not any(word.arg == "trust_remote_code" for word in node.keywords), place
    assert not [place for place, _ in used(r"(eval|os\.system|os\.popen)$")]


# Chat templates -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["chat_template", "chat_template_kwargs", "template", "documents", "mm_processor_kwargs"]
)
def test_chat_templates_never_come_from_a_client(client: Client, field: str) -> None:
    bomb = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    for path in ("/v1/chat/completions", "/tokenize", "/v1/responses"):
        body = {"messages": HELLO} if path != "/v1/responses" else {"input": "hello"}
        answer = client.post(path, {**body, field: bomb})
        assert answer.status == 400
        assert field in answer.message


def test_a_template_in_a_message_is_only_text(client: Client) -> None:
    bomb = "{% for a in range(10**9) %}{{ cycler.__init__.__globals__ }}{% endfor %}"
    fields = {"messages": [{"role": "user", "content": bomb}], "max_tokens": 1}
    assert client.post("/v1/chat/completions", fields).status == 200


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
    return Engine(ToyBackend(max_rows=64, vocab=tokenizer.vocab_size), tokenizer, limits, num_pages=200)


@pytest.mark.parametrize("bomb", BOMBS)
def test_grammar_and_regex_bombs_are_refused(client: Client, bomb: str) -> None:
    assert refused(client, structured_outputs=BOMBS[bomb])
    assert client.get("/health").status == 200


def test_grammars_are_compiled_beside_the_event_loop(grammar_engine: Engine, monkeypatch: Any) -> None:
    """While one is being compiled, however long it takes, the server answers others."""
    begun, go_on = threading.Event(), threading.Event()
    compile_grammar = grammar_engine.grammars.compile

    def slow(structure: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return compile_grammar(structure)

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
def test_a_body_that_is_no_sane_json_is_refused(client: Client, body: bytes) -> None:
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


# HTTP and auth ------------------------------------------------------------------------------------------


def test_header_size_is_bounded(client: Client) -> None:
    assert client.get("/health", X_Long="a" * MOST_HEAD_BYTES).status == 431


def test_the_host_header_has_no_say_in_auth() -> None:
    with serving(api_key=("sk-1",)) as client:
        assert client.get("/v1/models", Host="localhost/health?").status in (400, 401)


def test_no_local_path_in_an_error() -> None:
    backend = ToyBackend(max_rows=64)
    with serving(toy_engine(backend)) as client:
        backend.fail_next = FileNotFoundError(f"{SOURCES}/secret")
        bodies = [
            client.complete().body,
            client.complete(model="no-such-model").body,
            client.complete(speculative={"method": "model", "model": str(SOURCES)}).body,
            client.complete(structured_outputs={"json": {"$ref": "file:secret"}}).body,
            client.post("/v1/chat/completions", {"messages": [{"role": "x", "content": "a"}]}).body,
            client.post("/v1/completions", b"{").body,
            client.get("/v1/models/nothing").body,
            client.get("/static/../../secret").body,
            client.raw(b"GET secret HTTP/1.1\r\n\r\n").body,
        ]
    for body in bodies:
        assert "error" in json.loads(body)
        told = body.decode().replace(f"{SOURCES!s}'", "")  # what the client sent it may get back
        for place in (str(SOURCES.parent), str(Path.home()), sys.prefix, "site-packages", ".py"):
            assert place not in told


# Leaks from one request to another --------------------------------------------------------------------------


def test_requests_share_cached_pages_only_with_those_of_the_same_salt() -> None:
    with serving() as client:
        prompt = "a prompt of several pages, which others may guess"

        def cached(**fields: object) -> int:
            answer = client.complete(prompt=prompt, max_tokens=1, **fields)
            count: int = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
            return count

        assert cached(cache_salt="ann") == 0
        assert cached(cache_salt="ann") > 0
        assert cached(cache_salt="bob") == 0  # nobody can tell by the time it takes what others asked
        assert cached() == 0
        assert cached() > 0


def test_pages_that_were_freed_are_never_read() -> None:
    """Others come and go, half of them by closing the connection; every free page is filled with rubbish."""
    fields = {"max_tokens": 30, "ignore_eos": True, "temperature": 0.9, "logprobs": 1}
    with serving() as client:
        expected = [
            client.complete(prompt=f"request {n}", seed=n, **fields).json["choices"] for n in range(8)
        ]
    engine = toy_engine(num_pages=120, max_num_seqs=6)
    step = engine.step

    def scribbling() -> Any:
        deltas = step()
        scribble_free_pages(engine)
        return deltas

    engine.step = scribbling  # type: ignore[method-assign]
    with serving(engine) as client:
        answers: dict[int, Any] = {}

        def ask(number: int) -> None:
            client.stream(prompt=f"other {number}", max_tokens=100, ignore_eos=True).close()
            answers[number] = client.complete(prompt=f"request {number}", seed=number, **fields).json[
                "choices"
            ]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: not engine.has_unfinished)
        assert engine.kv.usage == 0
    assert [answers[number] for number in range(8)] == expected


# Path traversal -----------------------------------------------------------------------------------------


def test_a_request_never_names_a_file(client: Client) -> None:
    """Whatever a request says: no file with that name is opened, looked at or run."""
    name = "a-name-that-only-requests-have"
    touched: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if (
            watching
            and name in repr(arguments)
            and event.split(".")[0] in ("open", "os", "subprocess", "import")
        ):
            touched.append(f"{event}{arguments}")

    sys.addaudithook(audit)
    place = f"../../{name}/../etc/passwd"
    sent = [
        client.complete(model=place),
        client.complete(prompt=place, max_tokens=1, cache_salt=name, user=place),
        client.complete(speculative={"method": "draft_model", "model": place}),
        client.complete(speculative={"method": "suffix", "suffix_cache_path": place}),
        client.complete(structured_outputs={"json": {"$ref": f"file:///{place}"}}),
        client.complete(structured_outputs={"grammar": f"%import {name}.WORD\nstart: WORD"}),
        client.complete(segment=place),
        client.post(
            "/v1/chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": f"file:///{place}"}}],
                    }
                ]
            },
        ),
        client.get(f"/v1/models/..%2f{name}"),
        client.get(f"/static/..%2f..%2f{name}"),
        client.get(f"/../../{name}"),
        client.get("/docs/../" + name),
        client.post("/tokenize", {"prompt": "a", "model": place}),
    ]
    watching = False
    assert touched == []
    assert {answer.status for answer in sent} == {200, 400, 404}


def test_every_test_that_the_documentation_names_exists() -> None:
    text = (SOURCES.parent / "docs" / "security.md").read_text()
    here = SOURCES.parent / "tests"
    sources = {path.name: path.read_text() for path in here.rglob("test_*.py")}
    for name in re.findall(r"test_\w+\.py", text):
        assert name in sources
    for name in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name
