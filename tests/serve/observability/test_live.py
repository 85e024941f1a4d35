"""The live page: its files, the list of running requests, and the page as a browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.serve.openai.answers import ALL_ERRORS
from tests.constrain.engines import make_engine
from tests.serve.observability.test_metrics import drafting_engine, generate
from tests.serve.running import Client, serving, until
from tests.toy import ENDLESS, roomy_engine

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"),
    # fast-forwards the page's timers, waiting for the server's answers: two samples of /metrics
    *("--virtual-time-budget=1500", "--dump-dom"),
)
KEY = "sk-live"


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """A server with a key, a client that has it, and one request that never ends."""
    with serving(roomy_engine(), api_key=(KEY,)) as made:
        made.headers["Authorization"] = f"Bearer {KEY}"
        yield made


def test_the_page_and_its_files_need_no_key_and_name_nothing_else(client: Client) -> None:
    stranger = Client(client.port)
    page = stranger.get("/")
    assert page.status == 200
    policy = page.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    texts, seen = [page.body.decode()], set()
    while texts:
        text = texts.pop()
        named = re.findall(r'(?:src|href)="(static/[^"]+)"', text)
        named += [f"static/{name}" for name in re.findall(r'from "\./([^"]+)"', text)]
        for path in set(named) - seen:
            seen.add(path)
            answer = stranger.get(f"/{path}")
            assert answer.status == 200, path
            texts.append(answer.body.decode())
        assert not re.findall(r"https?://(?!www\.w3\.org)", text)
    assert {Path(path).suffix for path in seen} == {".css", ".js", ".svg"}
    for data in ("/metrics", "/requests"):
        assert stranger.get(data).status == 401
    for path in ("/static/", "/static/nothing.js", "/static/..%2flive.py", "/static/../live.py"):
        assert client.get(path).status == 404


def test_the_page_explains_every_status_that_the_api_documents(client: Client) -> None:
    script = client.get("/static/panels.js").body.decode()
    (table,) = re.findall(r"const MEANING = \{(.*?)\};", script, flags=re.DOTALL)
    assert {int(status) for status in re.findall(r"(\d+): \"\w", table)} >= set(ALL_ERRORS)


def test_running_requests_are_listed_without_their_texts(client: Client) -> None:
    assert client.get("/requests").json == {"requests": []}
    with client.stream(prompt="a secret", max_tokens=ENDLESS, ignore_eos=True, segment="chat") as stream:
        assert stream.fileno() > 0
        until(lambda: client.get("/requests").json["requests"][0]["output_tokens"] > 2)
        answer = client.get("/requests")
        (request,) = answer.json["requests"]
        assert request["segment"] == "chat"
        assert request["state"] == "decode"
        assert request["drafter"] is None
        assert request["prompt_tokens"] > 0
        assert request["max_output_tokens"] == ENDLESS
        assert request["tokens_per_second"] > 0
        assert request["age_seconds"] > 0
        assert "secret" not in answer.body.decode()
    until(lambda: client.get("/requests").json == {"requests": []})


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: install it to look at the page in a browser")
def test_a_browser_shows_the_server(tmp_path: Path) -> None:
    with serving(drafting_engine()) as client:
        generate(client, "one", segment="letters")
        assert client.complete(temperature=-1).status == 400
        with client.stream(max_tokens=200, ignore_eos=True):
            page = _shown(f"http://127.0.0.1:{client.port}/", tmp_path)
    words = _words(page)
    assert "healthy" in words
    assert "toy" in words
    for title in ("Time to first token", "Inter-token latency, per step", "Tokens per drafted step"):
        assert title in words
    assert words.count("−60 s") == words.count("now") == 6  # each chart has a time axis
    drafter = words.index("scripted")
    drafts, drafted, accepted, share = words[drafter + 1 : drafter + 5]
    assert int(drafted) > int(accepted) > 0 < int(drafts)
    assert share == f"{round(100 * int(accepted) / int(drafted))} %"
    assert "needs --draft auto" in words  # a fixed plan is never compared with plain decoding
    assert words[words.index("letters") + 1 :][:2] == ["1", "40"]  # outputs, tokens
    error = words.index("/v1/completions")
    assert words[error + 1 : error + 4] == ["400", "wrong request", "1"]


@pytest.mark.skipif(BROWSER is None, reason="no chromium here: install it to look at the page in a browser")
def test_a_browser_tells_forced_tokens_from_guesses(tmp_path: Path) -> None:
    facts = {"drafters": "suffix,ngram", "draft_control": "auto"}
    with serving(make_engine(), facts=facts) as client:
        choice = {"choice": ["the only answer"]}
        answer = client.complete(structured_outputs=choice, max_tokens=40, segment="letters")
        assert answer.json["choices"][0]["text"] == "the only answer"
        words = _words(_shown(f"http://127.0.0.1:{client.port}/", tmp_path))
    assert any("drafting: auto (suffix, ngram)" in word for word in words)
    forced = int(words[words.index("forced by a grammar") + 1 :][1])  # after its number of drafts
    assert forced > 3
    assert f"Includes {forced} tokens that a grammar forced: they are not guesses." in words
    segment = words[words.index("letters") :]
    assert segment[3:5] == ["–", str(forced)]  # no guesses, and the forced tokens
    headings = ["guesses accepted", "forced", "tokens/step"]
    assert words[words.index(headings[0]) :][:3] == headings


def _words(page: str) -> list[str]:
    """The texts of a page."""
    return [word for word in re.split(r"\|+", re.sub(r"<[^>]*>", "|", page)) if word.strip()]


def _shown(url: str, folder: Path) -> str:
    """The page as a browser has built it after two samples."""
    assert BROWSER is not None
    command = (BROWSER, *FLAGS, f"--user-data-dir={folder}", url)
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return run.stdout
