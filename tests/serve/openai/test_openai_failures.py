"""What a user of the official client sees when the engine fails: before an answer, and in a stream."""

from __future__ import annotations

import openai
import pytest

from tests.serve.running import serving
from tests.toy import toy_engine
from tests.toy_passes import BreakingToy


def client_at(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def test_a_failure_before_the_answer_is_a_500_without_details() -> None:
    with serving(toy_engine(BreakingToy(1))) as server, client_at(server.port) as client:
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="toy", prompt="abc")
        assert "secret" not in str(failed.value)
        assert client.completions.create(model="toy", prompt="abc").choices  # the server lives


@pytest.mark.parametrize("chat", [False, True])
def test_a_failure_in_a_stream_is_an_api_error_after_the_text_so_far(chat: bool) -> None:
    extra = {"ignore_eos": True, "logprobs": True if chat else 0}  # log-probabilities: a chunk for each token
    with serving(toy_engine(BreakingToy(5))) as server, client_at(server.port) as client:
        stream = (
            client.chat.completions.create(
                model="toy", messages=[{"role": "user", "content": "abc"}], stream=True, extra_body=extra
            )
            if chat
            else client.completions.create(model="toy", prompt="abc", stream=True, extra_body=extra)
        )
        chunks = [next(stream) for _ in range(3)]
        assert all(chunk.choices for chunk in chunks)
        with pytest.raises(openai.APIError) as failed:
            list(stream)
        assert "secret" not in str(failed.value)
        assert client.completions.create(model="toy", prompt="abc").choices


def test_a_response_that_fails_says_so_in_its_last_event() -> None:
    with serving(toy_engine(BreakingToy(5))) as server, client_at(server.port) as client:
        events = list(
            client.responses.create(model="toy", input="abc", stream=True, extra_body={"ignore_eos": True})
        )
        assert events[-1].type == "response.failed"
        assert "secret" not in events[-1].to_json()
