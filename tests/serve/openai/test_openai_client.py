"""The official client against a real server with the default model: text, streams, errors, endings."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from benchmarks.server.gauges import metric_sums
from benchmarks.server.process import ServerProcess
from paceline import LLM
from tests.serve.conftest import KEY, MODEL, ROOM

pytestmark = pytest.mark.real

PROMPT = "The capital of France is"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "What is the capital of Italy?"},
]


def metrics_of(server: ServerProcess) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {KEY}"})
    assert page.status_code == 200
    return metric_sums(page.text)


def wait_until_idle(server: ServerProcess) -> dict[str, float]:
    """The metrics once nothing runs; fails if that takes long."""
    until = time.monotonic() + 20
    while time.monotonic() < until:
        sums = metrics_of(server)
        if not sums["paceline:num_requests_running"] + sums["paceline:num_requests_waiting"]:
            return sums
        time.sleep(0.02)
    raise AssertionError(f"requests are left: {sums}")


# --- models ---


def test_models_are_listed_and_found_by_name(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


# --- completions ---


def test_completion_of_a_string(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0)
    (choice,) = answer.choices
    assert choice.text.startswith(" Paris")
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 8
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8


def test_completions_of_strings_ids_and_lists_of_ids_are_numbered_by_prompt(
    client: openai.OpenAI, offline: LLM
) -> None:
    ids = offline.get_tokenizer().encode(PROMPT)
    settings: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    one = client.completions.create(prompt=PROMPT, **settings).choices[0].text
    assert client.completions.create(prompt=ids, **settings).choices[0].text == one
    several = client.completions.create(prompt=[PROMPT, "1, 2, 3,"], n=2, **settings).choices
    assert [choice.index for choice in several] == [0, 1, 2, 3]
    assert [choice.text for choice in several[:2]] == [one, one]
    assert several[2].text != one
    both = client.completions.create(prompt=[ids, ids], **settings).choices
    assert [choice.text for choice in both] == [one, one]


def test_echo_gives_the_prompt_back_with_its_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, temperature=0, echo=True, logprobs=2
    )
    (choice,) = answer.choices
    assert choice.text.startswith(PROMPT)
    assert choice.logprobs is not None
    tokens, values = choice.logprobs.tokens or [], choice.logprobs.token_logprobs or []
    assert "".join(tokens) == choice.text
    assert len(tokens) == len(values)
    assert values[0] is None  # nothing comes before it
    assert all(value <= 0 for value in values[1:])


def test_a_streamed_completion_is_the_whole_one_in_pieces(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0.9,
        "seed": 4,
    }
    whole = client.completions.create(**settings)
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **settings))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_suffix_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt=PROMPT, suffix=" and more")
    assert refused.value.param == "suffix"


# --- chat ---


def test_chat_with_a_system_message_and_several_turns(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, temperature=0)
    said = first.choices[0].message
    assert said.role == "assistant"
    assert said.content
    turns: list[Any] = [*MESSAGES, said, {"role": "user", "content": "And of Spain?"}]
    second = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=8, temperature=0)
    assert second.choices[0].message.content
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens + first.usage.completion_tokens
    assert first.id != second.id
    assert first.system_fingerprint == second.system_fingerprint


def test_chat_stream_begins_with_the_role_and_ends_with_reason_and_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_completion_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] in ("stop", "length")
    assert set(reasons[:-1]) == {None}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens <= 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_options_do_what_they_say(client: openai.OpenAI, offline: LLM) -> None:
    def ask(**options: Any) -> Any:
        return client.chat.completions.create(
            **{"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 0, **options}
        )

    plain = ask().choices[0].message.content
    seeded = [ask(temperature=1.0, seed=seed).choices[0].message.content for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] != seeded[2]
    several = ask(n=3, temperature=1.0, seed=5).choices
    assert [choice.index for choice in several] == [0, 1, 2]
    assert several[0].message.content == seeded[0]
    assert len({choice.message.content for choice in several}) > 1
    stopped = ask(stop=[plain[1:3]]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content == plain[: plain.index(plain[1:3])]
    (wanted,) = offline.get_tokenizer().encode(" yes", add_special_tokens=False)
    biased = ask(logit_bias={str(wanted): 100}, max_tokens=3).choices[0].message.content
    assert biased == " yes yes yes"


def test_chat_logprobs_have_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert (
        bytes(byte for entry in entries for byte in entry.bytes or ())
        .decode()
        .startswith(choice.message.content or "")
    )
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob  # greedy takes the likeliest
        ranked = [other.logprob for other in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)


def test_fields_beyond_openais_go_in_extra_body(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "prompt": "1 2 3 4 1 2 3 4 1 2 3 4",
        "max_tokens": 24,
        "seed": 1,
    }
    extra = {"top_k": 1, "ignore_eos": True, "return_metrics": True, "segment": "counting", "min_p": 0.01}
    drafted = client.completions.create(extra_body={**extra, "speculative": {"method": "ngram"}}, **settings)
    plain = client.completions.create(extra_body={**extra, "speculative": "off"}, **settings)
    assert drafted.choices[0].text == plain.choices[0].text
    figures = drafted.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index, call-overload]
    assert figures["num_draft_tokens"] >= figures["num_accepted_draft_tokens"] > 0
    assert figures["mean_acceptance_length"] > 1
    none = plain.to_dict()["metrics"]["speculative_decoding"]  # type: ignore[index, call-overload]
    assert none["num_draft_tokens"] == 0


# --- errors ---


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
        ({"extra_body": {"speculative": {"method": "telepathy"}}}, "speculative"),
    ],
)
def test_a_bad_request_names_its_field(client: openai.OpenAI, wrong: dict[str, Any], param: str) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, **wrong}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**body)
    assert refused.value.param == param
    assert param in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_a_model_that_is_not_served_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert refused.value.code == "model_not_found"


def test_a_wrong_key_is_an_authentication_error(real_server: ServerProcess) -> None:
    with (
        openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="sk-wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_a_full_queue_is_a_rate_limit_error_with_retry_after(
    client: openai.OpenAI, real_server: ServerProcess
) -> None:
    busy = [
        client.completions.create(
            model=MODEL,
            prompt=PROMPT,
            n=ROOM // 2,
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in range(2)
    ]
    try:
        for stream in busy:
            next(iter(stream))  # it runs, or waits behind the other
            break
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt=PROMPT)
        assert int(refused.value.response.headers["retry-after"]) >= 1
    finally:
        for stream in busy:
            stream.close()
    wait_until_idle(real_server)
    assert client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1).choices


# --- endings and figures ---


def test_a_closed_stream_frees_its_pages_and_is_counted_as_aborted(
    client: openai.OpenAI, real_server: ServerProcess
) -> None:
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    assert metrics_of(real_server)["paceline:num_requests_running"] == 1
    stream.close()
    sums = wait_until_idle(real_server)
    assert sums["paceline:kv_cache_usage_perc"] == 0


def test_the_counters_grow_by_the_requested_tokens(client: openai.OpenAI, real_server: ServerProcess) -> None:
    before = wait_until_idle(real_server)
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=9, extra_body={"ignore_eos": True}
    )
    after = wait_until_idle(real_server)

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert answer.usage is not None
    assert grown("paceline:generation_tokens_total") == answer.usage.completion_tokens == 9
    assert grown("paceline:prompt_tokens_total") == answer.usage.prompt_tokens
    assert grown("paceline:request_success_total") == 1
    assert grown("paceline:time_to_first_token_seconds_count") == 1
    assert grown("paceline:e2e_request_latency_seconds_count") == 1


def test_the_async_client_streams_many_at_once(real_server: ServerProcess) -> None:
    async def work() -> None:
        async with openai.AsyncOpenAI(base_url=f"{real_server.url}/v1", api_key=KEY, max_retries=0) as client:

            async def ask(seed: int, stream: bool) -> str:
                settings: dict[str, Any] = {
                    "model": MODEL,
                    "messages": MESSAGES,
                    "max_tokens": 8,
                    "seed": seed,
                }
                if not stream:
                    whole = await client.chat.completions.create(**settings)
                    return whole.choices[0].message.content or ""
                chunks = await client.chat.completions.create(stream=True, **settings)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

            texts = await asyncio.gather(*(ask(seed % 6, seed >= 6) for seed in range(12)))
            assert texts[:6] == texts[6:]

    asyncio.run(work())


def test_detokenize_inverts_tokenize(real_server: ServerProcess) -> None:
    with httpx.Client(base_url=real_server.url, headers={"Authorization": f"Bearer {KEY}"}) as http:
        tokens = http.post("/tokenize", json={"model": MODEL, "prompt": PROMPT}).json()
        assert tokens["count"] == len(tokens["tokens"])
        assert http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == PROMPT
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["count"] > tokens["count"]
        assert http.get("/version").json()["version"]
        assert http.get("/health").status_code == 200
