"""`paceline generate`: prompts, flags, streaming, JSON, chat, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams
from paceline.terminal import generate as generate_room
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import ToyBackend, ToyTokenizer, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_generate_prints_what_the_python_api_gives(paceline, toy):
    (expected,) = toy.generate("hello", GREEDY)
    flags = ("--temperature", 0, "--max-tokens", 8, "--ignore-eos")
    assert paceline("generate", "--prompt", "hello", *flags) == (0, expected.outputs[0].text + "\n", "")


def test_a_prompt_comes_from_a_file_or_a_pipe_without_its_last_line_break(paceline, toy, tmp_path):
    flags = ("--temperature", 0, "--max-tokens", 8, "--ignore-eos")
    expected = paceline("generate", "--prompt", "hello", *flags)
    file = tmp_path / "prompt.txt"
    file.write_text("hello\n")
    assert paceline("generate", "--prompt-file", file, *flags) == expected
    assert paceline("generate", *flags, stdin=b"hello\r\n") == expected


def test_several_prompts_and_outputs_are_told_apart(paceline, toy):
    code, out, _ = paceline("generate", "--prompt", "a", "--prompt", "b", "--n", 2, "--seed", 3)
    assert code == 0
    heads = [f"[prompt {prompt} of 2, output {output} of 2]" for prompt in (1, 2) for output in (1, 2)]
    assert [line for line in out.splitlines() if line.startswith("[prompt ")] == heads


def test_json_has_everything_that_the_python_api_gives(paceline, toy):
    flags = shlex.split("--json --seed 5 --max-tokens 4 --ignore-eos --logprobs 2 --prompt-logprobs 1 --n 2")
    code, out, _ = paceline("generate", "a-model", "--prompt", "hello", *flags)
    assert code == 0
    document = json.loads(out)
    assert document["model"] == "a-model"
    (output,) = document["outputs"]
    assert output["prompt"] == "hello"
    assert output["prompt_token_ids"] == ToyTokenizer().encode("hello")
    assert [len(one["token_ids"]) for one in output["outputs"]] == [4, 4]
    assert len(output["outputs"][0]["logprobs"]) == 4
    assert len(output["prompt_logprobs"]) == 6
    assert document["stats"]["output_tokens"] == 8
    assert document["stats"]["prompt_tokens"] == 6


@pytest.mark.parametrize(
    ("flags", "answers"),
    [
        (["--choice", "ABBA", "--choice", "AA"], "(ABBA|AA)"),
        (["--regex", "[AB]{3}C"], "[AB]{3}C"),
        (["--json-schema", '{"enum": [10, 20]}'], "(10|20)"),
        (["--json-schema", "schema.json"], "(30|40)"),
        (["--grammar", "grammar.lark"], "A+B"),
    ],
)
def test_an_answer_has_the_form_that_a_flag_asks_for(paceline, toy, tmp_path, monkeypatch, flags, answers):
    monkeypatch.chdir(tmp_path)
    Path("schema.json").write_text('{"enum": [30, 40]}')
    Path("grammar.lark").write_text('start: "A"+ "B"')
    code, out, _ = paceline("generate", "--prompt", "hello", "--seed", 3, "--max-tokens", 200, *flags)
    assert code == 0
    assert re.fullmatch(answers + "\n", out)


def test_an_unreadable_schema_is_reported(paceline, toy):
    code, _, err = paceline("generate", "--prompt", "a", "--grammar", "no-such-file")
    assert (code, "--grammar 'no-such-file' cannot be read" in err) == (2, True)
    code, _, err = paceline("generate", "--prompt", "a", "--regex", "a", "--json-object")
    assert (code, "exactly one of" in err) == (2, True)


def test_every_sampling_flag_reaches_the_request(monkeypatch, paceline, toy):
    seen = []
    monkeypatch.setattr(generate_room, "stream", lambda llm, ids, params, write: seen.append(params) or 1 / 0)
    flags = shlex.split("""--temperature 0.5 --top-k 7 --top-p 0.8 --min-p 0.1 --repetition-penalty 1.1
        --presence-penalty -0.5 --frequency-penalty 0.25 --seed 9 --stop x --stop y --stop-token-ids 5
        --stop-token-ids 6 --min-tokens 2 --max-tokens 9 --ignore-eos --no-skip-special-tokens
        --include-stop-str-in-output --logit-bias '{"5": -100, "6": 1.5}' --allowed-token-ids 7
        --allowed-token-ids 8 --bad-words x --bad-words 'y z'""")
    with pytest.raises(ZeroDivisionError):
        paceline("generate", "--prompt", "a", *flags)
    assert seen == [
        SamplingParams(
            temperature=0.5,
            top_k=7,
            top_p=0.8,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            logit_bias={5: -100.0, 6: 1.5},
            allowed_token_ids=[7, 8],
            bad_words=["x", "y z"],
            seed=9,
            stop=["x", "y"],
            stop_token_ids=[5, 6],
            min_tokens=2,
            max_tokens=9,
            ignore_eos=True,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        )
    ]


def test_engine_flags_reach_the_engine(paceline, toy):
    flags = shlex.split("""--backend torch --dtype bfloat16 --device cuda --threads 2
        --tensor-parallel-size 2 --max-model-len 64 --max-num-seqs 3
        --max-num-batched-tokens 32 --no-enable-prefix-caching --draft suffix,ngram
        --share-suffix-cache prompts""")
    code, _, _ = paceline("generate", "a-model", "--prompt", "a", *flags)
    assert code == 0
    assert toy.asked == {
        "model": "a-model",
        "backend": "torch",
        "dtype": "bfloat16",
        "quantization": "auto",
        "device": "cuda",
        "threads": 2,
        "tensor_parallel_size": 2,
        "exact": False,
        "tokenizer": None,
        "max_model_len": 64,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 32,
        "kv_cache_memory_bytes": None,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": False,
        "speculative_config": "suffix,ngram",
        "log_decisions": None,
        "share_suffix_cache": "prompts",
    }


def test_exact_refuses_inexact_settings(paceline, toy):
    assert paceline("generate", "--prompt", "a", "--exact")[0] == 0
    assert toy.asked["exact"] is True
    code, _, err = paceline("generate", "--prompt", "a", "--exact", "--backend", "torch")
    assert code == 2
    assert "backend='cpu'" in err


def test_chat_applies_the_template_with_the_system_message(paceline, toy):
    code, out, _ = paceline("generate", "--prompt", "hi", "--chat", "--system", "be brief", "--json")
    assert code == 0
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    (output,) = json.loads(out)["outputs"]
    assert output["prompt"] == ToyTokenizer().apply_chat_template(messages)
    assert output["prompt_token_ids"] == ToyTokenizer().encode(output["prompt"], add_special_tokens=False)


def test_stats_tell_tokens_speed_and_prefix_hits(paceline, toy):
    flags = ("--max-tokens", 5, "--ignore-eos", "--stats")
    paceline("generate", "--prompt", "a" * 20, *flags)
    code, _, err = paceline("generate", "--prompt", "a" * 20, *flags)
    assert code == 0
    assert "21 prompt tokens, 5 output tokens" in err
    assert "tokens/s" in err
    assert "prefix cache: 20 of 42 tokens found" in err


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (("--prompt", ""), None, "a prompt is empty"),
        ((), b"", "there is no prompt: give --prompt"),
        ((), b"\n", "a prompt is empty"),
        ((), b"\xff\xfe", "standard input is not UTF-8: byte 0 is 0xff"),
        (("--prompt-file", "nowhere.txt"), None, "nowhere.txt cannot be read"),
        (("--prompt", "a" * 500), None, "the context holds 400"),
        (("--prompt", "a", "--logit-bias", "{"), None, "--logit-bias must be a JSON object"),
        (("--prompt", "a", "--logit-bias", "[1]"), None, "--logit-bias must be a JSON object"),
        (("--prompt", "a", "--logit-bias", '{"x": 1}'), None, "--logit-bias must be a JSON object"),
        (("--prompt", "a", "--logit-bias", '{"5": "b"}'), None, "logit_bias[5] must be a number"),
        (("--prompt", "a", "--logprobs", "1"), None, "with --json only"),
        (("--prompt", "a", "--system", "b"), None, "add --chat"),
        (("--prompt", "a", "--max-tokens", "0"), None, "give a large number"),
        (("--prompt", "a", "--stop-token-ids", "5000"), None, "ids go from 0 to 96"),
    ],
)
def test_invalid_generate_arguments_are_refused(paceline, toy, arguments, stdin, message):
    code, out, err = paceline("generate", *arguments, stdin=stdin)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err


def test_a_failed_request_is_reported_after_the_other_outputs(monkeypatch, paceline):
    llm = LLM.from_engine(toy_engine(ToyBackend(nan_after=ToyTokenizer().encode("b")[-1])), ToyTokenizer())
    monkeypatch.setattr(generate_room, "load", lambda model, options: llm)
    bias = json.dumps({ToyTokenizer().encode("b")[-1]: -100})
    code, out, err = paceline("generate", "--prompt", "a", "--prompt", "b", "--logit-bias", bias)
    assert code == 2
    assert "[prompt 2 of 2]" in out
    assert "NaN" in err


def test_a_model_file_generates_from_the_shell(paceline, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama")))
    flags = ("--temperature", 0, "--max-tokens", 8, "--ignore-eos", "--json")
    runs = [json.loads(paceline("generate", path, "--prompt", "abc", *flags)[1]) for _ in range(2)]
    tokens = [run["outputs"][0]["outputs"][0]["token_ids"] for run in runs]
    assert len(tokens[0]) == 8
    assert tokens[0] == tokens[1]
