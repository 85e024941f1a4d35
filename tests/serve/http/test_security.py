"""What has gone wrong in servers like this one, by class. docs/guides/security.md says what we do about each.

Classes with more tests have their own files: test_security_bombs.py, test_auth.py, test_limits.py and
test_logs.py here, tests/models/ for files, tests/constrain/ for grammars, tests/lossless/test_edges.py.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.serve.http.connections import MAX_HEAD_BYTES
from paceline.serve.options import ServeOptions
from tests.serve.running import Client, serving, until
from tests.toy import ToyBackend, scribble_free_pages, toy_engine

SOURCES = Path(paceline.__file__).parent
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with serving() as made:
        yield made


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
                found.append((place, dotted(node.func), node))
    return found


def dotted(node: ast.expr) -> str:
    """A name with its attributes; nothing before the first dot if that is no name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def used(pattern: str) -> list[tuple[str, ast.AST]]:
    """Where our sources import or call a name that begins like this."""
    return [
        (f"{place}: {name}", node) for place, name, node in imports_and_calls() if re.match(pattern, name)
    ]


def test_no_pickle_and_no_sockets_between_processes() -> None:
    unsafe = r"(pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib|multiprocessing|zmq|xmlrpc|yaml)\b"
    assert {place.partition(":")[0] for place, _ in used(unsafe)} == {
        "kernel_cache.py",  # compiled kernels are numba's pickles, in a folder of the user's own
        "backends/torch/parallel/calls.py",  # calls to the ranks of a model, over a pipe that a rank inherits
        "backends/torch/parallel/ranks.py",
        "backends/torch/parallel/worker.py",
        "serve/kv_events/publisher.py",  # ZeroMQ, which only sends, and only if KV events are asked for
    }
    # sockets that are bound: the server's own, and an ingress's for tokens of its replicas, with a secret
    bound = [
        place for place, _ in used(r".*(\.listen|listener\.bind|create_server|start_server|unix_server)$")
    ]
    assert sorted(bound) == [
        "scale/remote/channel.py: asyncio.start_server",
        "serve/server.py: listener.bind",
    ]
    assert [place for place, _ in used(r"socket\.socket$")] == ["serve/server.py: socket.socket"]


def test_the_only_child_process_gets_json_over_pipes() -> None:
    started = [place for place, _ in used(r"subprocess\.|os\.(fork|posix_spawn|spawn|exec)")]
    serving = ("serve/", "engine/", "constrain/", "kv/", "verify/", "control/")
    assert [place for place in started if place.startswith(serving)] == [
        "constrain/trial.py: subprocess.Popen"
    ]


def test_the_server_listens_on_loopback_by_default() -> None:
    assert ServeOptions().host == "127.0.0.1"


# Code in checkpoints ------------------------------------------------------------------------------------


def test_no_code_is_loaded_from_checkpoints() -> None:
    assert used(r"torch\.(jit\.load|hub\.)") == []
    assert [place for place, _ in used(r"torch\.load$")] == ["models/heads/checkpoint.py: torch.load"]
    for place, node in used(r"torch\.load$"):
        assert isinstance(node, ast.Call)
        assert {word.arg: ast.unparse(word.value) for word in node.keywords}["weights_only"] == "True", place
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


# HTTP and auth ------------------------------------------------------------------------------------------


def test_header_size_is_bounded(client: Client) -> None:
    assert client.get("/health", X_Long="a" * MAX_HEAD_BYTES).status == 431


def test_the_host_header_does_not_affect_auth() -> None:
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
        text = body.decode().replace(f"{SOURCES!s}'", "")  # what the client sent it may get back
        for place in (str(SOURCES.parent), str(Path.home()), sys.prefix, "site-packages", ".py"):
            assert place not in text


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
        assert cached(cache_salt="bob") == 0  # the time must not reveal what others asked
        assert cached() == 0
        assert cached() > 0


def test_pages_that_were_freed_are_never_read() -> None:
    """Other requests come and go, half of them by a disconnect; every free page is filled with garbage."""
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
    """Whatever a request says: no file with that name is opened, inspected or run."""
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
    text = (SOURCES.parent / "docs" / "guides" / "security.md").read_text()
    here = SOURCES.parent / "tests"
    sources = {path: path.read_text() for path in here.rglob("test_*.py")}
    for name in re.findall(r"test_\w+\.py", text):
        assert name in {path.name for path in sources}
    for name in re.findall(r"`(?:[\w/]+\.py::)?(test_\w+)`", text):
        assert any(f"def {name}(" in source for source in sources.values()), name
