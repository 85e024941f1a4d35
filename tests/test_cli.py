"""The command line: flags, streaming, JSON, chat, and error messages."""

from __future__ import annotations

import dataclasses
import errno
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams, __version__
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.learn.options import LearnOptions
from paceline.peer_options import LLAMA_CPP, VLLM
from paceline.serve.options import ServeOptions
from paceline.terminal import generate as generate_room
from paceline.terminal.flag_groups import ENGINE, LEARN, SAMPLING, SCALE, SEED, SERVER
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.toy import ToyBackend, ToyTokenizer, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


# The whole -----------------------------------------------------------------------------------------


def test_version_and_help_name_every_command(paceline):
    assert paceline("--version") == (0, f"paceline {__version__}\n", "")
    code, out, _ = paceline("--help")
    assert code == 0
    commands = (
        "generate",
        "chat",
        "check",
        "serve",
        "models",
        "bench",
        "tune",
        "readiness",
        "train",
        "export",
    )
    for command in commands:
        assert f"\n  {command} " in out


@pytest.mark.parametrize("group", ["", "models", "bench", "train", "learn", "scale"])
def test_help_describes_every_command_by_a_whole_sentence(paceline, group):
    code, out, _ = paceline(*group.split(), "--help")
    assert code == 0
    assert "..." not in out.partition("\nCommands:")[2].partition("\n\n")[0]


@pytest.mark.parametrize(
    "command",
    [
        *("serve", "generate", "chat", "bench run", "bench serve", "tune", "readiness", "simulate", "export"),
        *("train eagle3", "train medusa", "train answers"),
    ],
)
def test_help_shows_the_common_options_in_20_lines_and_the_others_by_topic(paceline, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, _ = paceline(*command.split(), "--help")
    assert code == 0
    sections = re.split(r"(?m)^(\S.*):$", out)[1:]
    titles, bodies = sections[::2], sections[1::2]
    assert titles[:2] == ["Arguments", "Options"]
    assert len(bodies[1].strip().splitlines()) <= 20
    assert len(titles) == len(set(titles))
    assert max(len(line) for line in out.splitlines()) <= 100
    flags = re.findall(r"(?m)^  (--\S+)", out)
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("option", VLLM)
def test_a_flag_of_vllm_is_refused_with_what_to_do_instead(paceline, option):
    flag = "--" + option.replace("_", "-")
    code, _, err = paceline("serve", "smollm2-135m", f"{flag}=1")
    assert code == 2
    assert err == f"error: {flag} is an option of vLLM that paceline does not have. {VLLM[option]}\n"
    flags = {flag.name for flag in (*ENGINE, *SERVER, *SCALE)}
    assert option not in flags
    for other in re.findall(r"--([a-z-]+)|\b([a-z]+_[a-z_]+)\b(?!\.)", VLLM[option]):
        assert "".join(other).replace("-", "_") in flags
    assert f"`{flag}" in (Path(__file__).parents[1] / "docs" / "guides" / "serve.md").read_text()


@pytest.mark.parametrize("flag", LLAMA_CPP)
def test_a_flag_of_llama_cpp_is_refused_with_what_to_do_instead(paceline, flag):
    code, _, err = paceline("serve", flag, "1")
    assert code == 2
    assert err == f"error: {flag} is an option of llama.cpp that paceline does not have. {LLAMA_CPP[flag]}\n"
    flags = {f"--{flag.name.replace('_', '-')}" for flag in (*ENGINE, *SERVER)} | {"--prompt", "--max-tokens"}
    assert set(re.findall(r"--[a-z-]+", LLAMA_CPP[flag])) <= flags | {"--draft"}
    assert f"`{flag}`" in (Path(__file__).parents[1] / "docs" / "guides" / "serve.md").read_text()


def test_a_hint_that_names_flags_which_the_command_lacks_is_not_given(paceline):
    """`--batch-size` of a training is not `--max-num-batched-tokens`, which only an engine has."""
    code, _, err = paceline("train", "eagle3", "smollm2-135m", "--batch-size", "8")
    assert (code, "No such option: --batch-size" in err, "llama.cpp" in err) == (2, True, False)
    code, _, err = paceline("train", "eagle3", "smollm2-135m", "--mlock")
    assert (code, err.endswith("that paceline does not have. Leave it out.\n")) == (2, True)


def test_flags_that_vllm_has_too_are_passed_on_to_commands_that_have_them(paceline):
    code, _, err = paceline("bench", "serve", "no address", "--model", "x")
    assert (code, "URL must be like" in err) == (2, True)
    code, _, err = paceline(
        "train", "dspark", "no/such/model", "--block-size", "8", "--data", "none", "--out", "x"
    )
    assert (code, "vLLM" in err) == (2, False)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "there is not enough memory. Use a smaller model"),
        (MemoryError("Unable to allocate 9 GiB"), "memory (Unable to allocate 9 GiB). Use a smaller model"),
        (RuntimeError("can't start new thread"), "memory (can't start new thread). Use a smaller"),
    ],
)
def test_a_lack_of_memory_is_reported_in_one_line(paceline, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(generate_room, "generate", fail)
    code, out, err = paceline("generate", "--prompt", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert "ulimit -v" in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device. Make room on"),
        (OSError(errno.EROFS, "Read-only file system", "a/b"), "error: a/b: Read-only file system. Give a"),
        (PermissionError(errno.EACCES, "Permission denied", "a"), "error: a: Permission denied. Check its"),
    ],
)
def test_a_disk_that_cannot_be_written_to_is_reported_in_one_line(paceline, monkeypatch, error, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(generate_room, "generate", fail)
    code, out, err = paceline("generate", "--prompt", "hi")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)


def test_the_command_line_starts_without_heavy_imports():
    heavy = ("numpy", "numba", "torch", "tokenizers", "jinja2")
    program = f"import sys, paceline.cli; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_flags_have_the_names_and_defaults_of_the_python_api():
    params = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    del params["speculative"]  # --draft says it for all requests of a command
    del params["structured_outputs"]  # has its own flags
    assert {flag.name: flag.default for flag in SAMPLING} == params
    config = EngineConfig()
    options = {}
    for part in (config.model, config.backend, config.cache, config.scheduler, config.speculative):
        options |= dataclasses.asdict(part)
    del options["model"]  # the argument
    del options["lora_modules"]  # a flag of the server: only its requests can name them
    assert {flag.name: flag.default for flag in ENGINE} == options
    assert SEED.default == config.seed
    for group, record in ((SERVER, ServeOptions()), (LEARN, LearnOptions())):
        values = {name: value or None if value == () else value for name, value in vars(record).items()}
        assert {flag.name: flag.default for flag in group} == values


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompt", "a", "--tempersture", "0"),
        ("generate", "--prompt", "a", "--temperature", "warm"),
        ("generate", "a-model", "another", "--prompt", "a"),
        ("chat", "--n", "2"),
        ("check", "--everything"),
        ("models", "pull", "--everything"),
        ("models", "frobnicate"),
        ("frobnicate",),
    ],
)
def test_unknown_options_and_commands_are_errors(paceline, toy, arguments):
    code, out, err = paceline(*arguments)
    assert (code, out) == (2, "")
    assert err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "no-such-model", "--prompt", "a"), "There is no model 'no-such-model'"),
        (("generate", "What is a paceline?"), "generate --prompt 'What is a paceline?'"),
        (("generate", "--prompt", "a", "--temperature", "nan"), "temperature must be a number"),
        (("generate", "--prompt", "a", "--backend", "tpu"), "backend must be one of auto, cpu, torch"),
        (("models", "pull", "smollm2"), "Did you mean 'smollm2-135m'?"),
        (("models", "show", "nowhere.gguf"), "There is no model"),
        (("serve", "--port", "70000"), "port must be an integer from 0 to 65535"),
        (("serve", "--host", "no.such.host.invalid"), "no address of this machine"),
        (("serve", "--api-key", "two words"), "api_key must be"),
        (("serve", "no-such-model", "--port", "0"), "There is no model 'no-such-model'"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_code_2(paceline, arguments, message):
    code, out, err = paceline(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err


def test_an_unexpected_exception_keeps_its_traceback(monkeypatch, toy):
    monkeypatch.setattr(generate_room, "run", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(sys, "argv", ["paceline", "generate", "--prompt", "a"])
    with pytest.raises(ZeroDivisionError):
        main()


# generate ------------------------------------------------------------------------------------------


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
