"""The offline API with vLLM's types, around the toy engine and a tiny model file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline import LLM, SamplingParams
from paceline.errors import ConfigError, RequestError
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import ToyBackend, ToyTokenizer, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm():
    return LLM.from_engine(toy_engine(), ToyTokenizer())


def test_one_prompt_or_many_in_any_form_give_outputs_in_order(llm):
    ids = ToyTokenizer().encode("hello")
    (one,) = llm.generate("hello", GREEDY)
    assert one.prompt == "hello"
    assert one.prompt_token_ids == ids
    assert one.finished
    for prompts in (ids, [ids], {"prompt": "hello"}, [{"prompt_token_ids": ids}], ["hello"]):
        (same,) = llm.generate(prompts, GREEDY)
        assert same.outputs[0].token_ids == one.outputs[0].token_ids
    many = llm.generate(["a", ids, {"prompt": "hello"}], GREEDY)
    assert [output.prompt for output in many] == ["a", None, "hello"]
    assert many[1].outputs[0].text == many[2].outputs[0].text == one.outputs[0].text


def test_an_output_has_the_parts_that_vllm_users_read(llm):
    params = SamplingParams(n=2, seed=5, max_tokens=4, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    (output,) = llm.generate("hello", params)
    assert [completion.index for completion in output.outputs] == [0, 1]
    first = output.outputs[0]
    assert (len(first.token_ids), first.finish_reason, first.stop_reason) == (4, "length", None)
    assert len(first.logprobs) == 4
    chosen = [entry[token] for entry, token in zip(first.logprobs, first.token_ids, strict=True)]
    assert first.cumulative_logprob == sum(entry.logprob for entry in chosen)
    assert all(isinstance(entry.decoded_token, str) for entry in chosen)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == 6
    metrics = output.metrics
    assert metrics.arrival_time < metrics.first_token_time < metrics.finished_time
    speculative = metrics.speculative
    assert (speculative.num_spec_steps, speculative.num_draft_tokens) == (0, 0)
    assert speculative.num_accepted_draft_tokens == 0
    assert (speculative.mean_acceptance_length, speculative.draft_acceptance_rate) == (1.0, 0.0)
    assert speculative.acceptance_histogram == []


def test_a_drafter_that_is_not_loaded_is_a_warning_and_in_the_metrics(llm):
    (expected,) = llm.generate("hello", GREEDY)
    hinted = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, speculative="eagle3")
    with pytest.warns(UserWarning, match="'eagle3', which is not loaded.*speculative_config"):
        (output,) = llm.generate("hello", hinted)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.metrics.speculative.unavailable_drafter == "eagle3"
    with pytest.warns(UserWarning, match="eagle3"):
        assert "".join(llm.stream("hello", hinted)) == expected.outputs[0].text


def test_parameters_may_be_one_for_all_or_one_for_each(llm):
    short, long = SamplingParams(max_tokens=1, ignore_eos=True), SamplingParams(max_tokens=3, ignore_eos=True)
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["a", "b"], [short, long])] == [1, 3]
    assert len(llm.generate("a", None)[0].outputs[0].token_ids) <= 16
    with pytest.raises(RequestError, match="2 prompts but 1"):
        llm.generate(["a", "b"], [short])
    with pytest.raises(RequestError, match="must be a SamplingParams"):
        llm.generate(["a", "b"], {"temperature": 0})


def test_chat_takes_one_conversation_or_several(llm):
    conversation = [{"role": "user", "content": "hi"}]
    (one,) = llm.chat(conversation, GREEDY)
    two = llm.chat([conversation, conversation], GREEDY)
    assert [output.outputs[0].text for output in two] == [one.outputs[0].text] * 2
    with pytest.raises(RequestError, match="messages"):
        llm.chat([], GREEDY)


def test_stream_gives_the_text_in_pieces_and_stopping_early_aborts(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate("hello", params)
    assert "".join(llm.stream("hello", params)) == whole.outputs[0].text
    pieces = llm.stream("hello", params)
    start = next(pieces)
    llm.generate("another call in between", params)
    assert start + "".join(pieces) == whole.outputs[0].text
    pieces = llm.stream("hello", params)
    next(pieces)
    pieces.close()
    assert not llm.engine.has_unfinished
    with pytest.raises(RequestError, match="n is 2"):
        next(llm.stream("hello", SamplingParams(n=2)))


def test_a_failing_request_leaves_the_others_alone():
    llm = LLM.from_engine(toy_engine(ToyBackend(nan_after=90)), ToyTokenizer())
    params = SamplingParams(temperature=0, max_tokens=3, logit_bias={90: -100}, ignore_eos=True)
    bad, good = llm.generate([[5, 90], [5, 6]], params)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.outputs[0].error is not None
    assert good.outputs[0].finish_reason == "length"
    with pytest.raises(paceline.PacelineError, match="NaN"):
        list(llm.stream([5, 90], params))


@pytest.mark.parametrize(
    "prompts", ["", [], [""], 5, None, b"bytes", [[]], [None], {"text": "a"}, {"prompt": ""}, [{}]]
)
def test_invalid_prompts_are_refused_and_nothing_is_left_behind(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)
    assert not llm.engine.has_unfinished


def test_one_refused_prompt_refuses_the_call_and_leaves_nothing_behind(llm):
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[5], [5000]], GREEDY)
    assert not llm.engine.has_unfinished


def test_unknown_engine_options_are_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="did you mean 'max_model_len'"):
        LLM("no such model", max_model_length=5)
    with pytest.raises(ConfigError, match="lora_modules is for servers"):
        LLM("smollm2-135m", lora_modules=["sql=folder"])


def test_the_same_calls_give_the_same_text():
    runs = [LLM.from_engine(toy_engine(seed=3), ToyTokenizer()).generate(["a", "b", "a"]) for _ in range(2)]
    texts = [[output.outputs[0].text for output in run] for run in runs]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][2]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = random_tensors(config_of("llama"))
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama", tensors)


@pytest.mark.parametrize("options", [{"backend": "torch"}, {"backend": "cpu", "threads": 1}])
def test_a_model_file_is_served_from_its_name_alone(tiny_model, options):
    llm = LLM(str(tiny_model), max_num_batched_tokens=32, **options)
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True)
    first, second = llm.generate(["abcabc", "abab"], params)
    assert len(first.outputs[0].token_ids) == 12
    assert first.outputs[0].text == tokenizer.decode(first.outputs[0].token_ids)
    assert second.prompt_token_ids == tokenizer.encode("abab")
    assert "".join(llm.stream("abcabc", params)) == first.outputs[0].text
    with pytest.raises(RequestError, match="context holds"):
        llm.generate([[5] * 10_000], params)


def test_a_context_beyond_the_models_is_refused(tiny_model):
    with pytest.raises(ConfigError, match="this model's context"):
        LLM(str(tiny_model), backend="torch", max_model_len=10**6)


def test_torch_is_not_imported_until_its_backend_is_used():
    modules = "sys, paceline.llm, paceline.build, paceline.backends.cpu"
    code = f"import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
