"""/v1/completions: the offline API's text in OpenAI's formats, whole and streamed."""

from __future__ import annotations

from typing import Any

import openai.types
import pytest

from paceline import LLM, SamplingParams
from paceline.serve.openai.completions import Completion
from tests.serve.api import Api
from tests.toy import ToyTokenizer, toy_engine

PATH = "/v1/completions"
BODY = {"prompt": "hello", "seed": 7, "max_tokens": 30, "ignore_eos": True}
IDS = ToyTokenizer().encode("hello")


def offline(prompt: Any, **params: Any) -> Any:
    llm = LLM.from_engine(toy_engine(max_model_len=400), ToyTokenizer())
    return llm.generate(prompt, SamplingParams(**params))[0]


def joined(chunks: list[Any], index: int = 0) -> str:
    return "".join(one["text"] for chunk in chunks for one in chunk["choices"] if one["index"] == index)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01},
        {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": {5: 8.5, 80: -100}},
        {"min_tokens": 12, "ignore_eos": False, "stop_token_ids": [30, 31]},
        {"stop": ["A", "&"], "include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"speculative": "off"},
    ],
)
def test_a_seed_gives_the_bytes_of_the_offline_api_whole_and_streamed(api: Api, options: Any) -> None:
    body = {**BODY, **options}
    params = {name: value for name, value in body.items() if name != "prompt"}
    (expected,) = offline("hello", **params).outputs
    (choice,) = api.post(PATH, body)["choices"]
    assert choice["text"] == expected.text
    assert (choice["finish_reason"], choice["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
    chunks = api.chunks(PATH, body)
    assert joined(chunks) == expected.text
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == (expected.finish_reason, expected.stop_reason)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


@pytest.mark.parametrize("prompt", ["hello", ["hello"], IDS, [IDS]])
def test_a_prompt_may_be_a_text_or_ids_alone_or_in_a_list(api: Api, prompt: Any) -> None:
    expected = offline("hello", seed=7, max_tokens=30, ignore_eos=True)
    answer = api.post(PATH, {**BODY, "prompt": prompt})
    assert answer["choices"][0]["text"] == expected.outputs[0].text
    assert answer["usage"]["prompt_tokens"] == len(IDS)


def test_outputs_of_several_prompts_are_numbered_prompt_by_prompt(api: Api) -> None:
    body = {**BODY, "prompt": ["hello", "other", IDS], "n": 2}
    choices = api.post(PATH, body)["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    for number, prompt in enumerate(["hello", "other", "hello"]):
        expected = offline(prompt, seed=7, max_tokens=30, ignore_eos=True, n=2).outputs
        assert [one["text"] for one in choices[2 * number : 2 * number + 2]] == [one.text for one in expected]
    chunks = api.chunks(PATH, body)
    assert [joined(chunks, index) for index in range(6)] == [choice["text"] for choice in choices]


def test_answers_and_chunks_match_openapi_and_the_official_client(api: Api) -> None:
    body = {**BODY, "n": 2, "logprobs": 3, "return_metrics": True, "max_tokens": 3}
    answer = api.post(PATH, body)
    Completion.model_validate(answer, extra="forbid")
    openai.types.Completion.model_validate(answer, strict=True)
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "toy"
    chunks = api.chunks(PATH, {**body, "stream_options": {"include_usage": True}})
    for chunk in chunks[:-1]:
        assert chunk["usage"] is None
        assert {chunk[name] for name in ("object", "model")} == {"text_completion", "toy"}
        assert (chunk["id"], chunk["created"]) == (chunks[0]["id"], chunks[0]["created"])
        assert chunk["system_fingerprint"] == answer["system_fingerprint"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {**answer["usage"], "prompt_tokens_details": {"cached_tokens": 4}}
    assert chunks[-1]["metrics"].keys() == answer["metrics"].keys()


def test_the_usage_counts_every_token_once(api: Api) -> None:
    usage = api.post(PATH, {**BODY, "prompt": [IDS, IDS + IDS], "n": 3, "max_tokens": 5})["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (18, 30, 48)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = api.chunks(PATH, {**BODY, "stream_options": options})
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 30
    assert chunks[0]["usage"]["total_tokens"] == chunks[0]["usage"]["prompt_tokens"] + counts[0]


def test_logprobs_are_the_engines_with_offsets_into_the_text(api: Api) -> None:
    expected = offline("hello", seed=7, max_tokens=30, ignore_eos=True, logprobs=2).outputs[0]
    (choice,) = api.post(PATH, {**BODY, "logprobs": 2})["choices"]
    logprobs = choice["logprobs"]
    chosen = [
        entry[token].logprob for entry, token in zip(expected.logprobs, expected.token_ids, strict=True)
    ]
    assert logprobs["token_logprobs"] == chosen
    for token, own, likeliest in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert likeliest[token] == own  # the sampled token is always listed
        assert len(likeliest) in (2, 3)
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if len(token) == 1:  # neither special nor part of a character
            assert choice["text"][offset] in (token, "�")
    streamed = [chunk["choices"][0]["logprobs"] for chunk in api.chunks(PATH, {**BODY, "logprobs": 2})]
    for name in logprobs:
        assert [value for part in streamed if part for value in part[name]] == logprobs[name]


def test_echo_puts_the_prompt_in_front(api: Api) -> None:
    (plain,) = api.post(PATH, BODY)["choices"]
    (echoed,) = api.post(PATH, {**BODY, "echo": True})["choices"]
    assert echoed["text"] == "hello" + plain["text"]
    assert joined(api.chunks(PATH, {**BODY, "echo": True})) == echoed["text"]
    (of_ids,) = api.post(PATH, {**BODY, "prompt": IDS, "echo": True})["choices"]
    assert of_ids["text"] == ToyTokenizer().decode(IDS) + plain["text"]


def test_echo_without_output_scores_a_prompt(api: Api) -> None:
    expected = offline("hello", max_tokens=1, prompt_logprobs=2)
    body = {"prompt": ["hello", "other"], "echo": True, "logprobs": 2, "max_tokens": 0, "temperature": 0}
    answer = api.post(PATH, body)
    first = answer["choices"][0]
    assert (first["text"], first["finish_reason"]) == ("hello", "length")
    logprobs = first["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == [
        entry[token].logprob for entry, token in zip(expected.prompt_logprobs[1:], IDS[1:], strict=True)
    ]
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4]
    assert answer["usage"]["completion_tokens"] == 0
    Completion.model_validate(answer, extra="forbid")


def test_prompt_logprobs_come_in_the_shape_of_vllm(api: Api) -> None:
    expected = offline("hello", max_tokens=1, prompt_logprobs=1).prompt_logprobs
    for beside in ({}, {"echo": True, "logprobs": 4}):  # which needs more of them for itself
        (choice,) = api.post(PATH, {**BODY, "prompt_logprobs": 1, **beside})["choices"]
        assert choice["prompt_logprobs"][0] is None
        for entry, own in zip(choice["prompt_logprobs"][1:], expected[1:], strict=True):
            assert {int(token): one["logprob"] for token, one in entry.items()} == {
                token: one.logprob for token, one in own.items()
            }


def test_max_tokens_defaults_to_16(api: Api) -> None:
    assert api.post(PATH, {"prompt": "hello", "ignore_eos": True})["usage"]["completion_tokens"] == 16


def test_a_field_may_be_null_as_clients_send_it(api: Api) -> None:
    nothing = dict.fromkeys(("stop", "logprobs", "n", "suffix", "best_of", "echo", "user", "stream_options"))
    assert api.post(PATH, {**BODY, **nothing})["choices"] == api.post(PATH, BODY)["choices"]


@pytest.mark.parametrize(
    ("options", "param", "message"),
    [
        ({"prompt": ""}, "prompt", "not empty"),
        ({"prompt": []}, "prompt", "must be a text"),
        ({"prompt": ["a", [1], 5]}, "prompt", "item 2 of the list is 5"),
        ({"prompt": [1, "a"]}, "prompt", "item 0 of the list is 1"),
        ({"prompt": [97]}, "prompt", "outside the vocabulary"),
        ({"prompt": [-1]}, "prompt", "outside the vocabulary"),
        ({"prompt": "x" * 500}, "prompt", "501 tokens"),
        ({"prompt": "x" * 200_000}, "prompt", "200001 tokens"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "130 outputs"),
        ({"suffix": "end"}, "suffix", "is not served"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "stream", "false"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logprobs": True}, "logprobs", "integer"),
        ({"prompt_logprobs": 1, "stream": True}, "stream", "false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream to true"),
        ({"return_metrics": True, "prompt": ["a", "b"]}, "return_metrics", "one prompt"),
        ({"min_tokens": 99}, "min_tokens", "at most max_tokens"),
        ({"stop": ""}, "stop", "1 to 256 characters"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop_token_ids": [97]}, "stop_token_ids", "97"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"logit_bias": {"97": 1}}, "logit_bias", "97"),
        ({"speculative": "nonsense"}, "speculative", "does not exist"),
        ({"speculative": {"method": "eagle3", "strict": True}}, "speculative", "has not loaded"),
        ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
        ({"seed": -(2**63) - 1}, "seed", "greater than or equal to -9223372036854775808"),
        ({"prompt": [5] * 400}, "prompt", "Shorten the prompt by 1 token, or"),
        ({"temprature": 1}, "temprature", "for this request: did you mean 'temperature'?"),
        ({"nonsense": 1}, "nonsense", "unknown option 'nonsense' for this request. See /docs"),
        ({"temperature": 1001}, "temperature", "less than or equal to 1000"),
        ({"segment": "two words"}, "segment", ""),
    ],
)
def test_unsupported_fields_are_refused_by_name(api: Api, options: Any, param: str, message: str) -> None:
    error = api.refusal(PATH, {**BODY, **options})
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert message in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_drafter_that_is_not_loaded_is_told_in_a_header_and_in_the_metrics(api: Api, stream: bool) -> None:
    body = {**BODY, "speculative": {"method": "eagle3"}, "return_metrics": True, "stream": stream}
    response = api.request("POST", PATH, json=body)
    assert response.status_code == 200
    assert response.headers["X-Speculative-Fallback"] == "eagle3 is not loaded; drafted as by default"
    assert '"unavailable_drafter":"eagle3"' in response.text
    usual = api.request("POST", PATH, json={**body, "speculative": "off"})
    assert "X-Speculative-Fallback" not in usual.headers
    assert '"unavailable_drafter":null' in usual.text


def test_a_text_may_go_without_special_tokens(api: Api) -> None:
    assert api.post(PATH, {**BODY, "add_special_tokens": False})["usage"]["prompt_tokens"] == 5
