"""The command line as a whole: help, flags, hints, and error messages."""

from __future__ import annotations

import dataclasses
import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import SamplingParams, __version__
from paceline.cli import main
from paceline.config import EngineConfig
from paceline.learn.options import LearnOptions
from paceline.peer_options import LLAMA_CPP, VLLM
from paceline.serve.options import ServeOptions
from paceline.terminal import generate as generate_room
from paceline.terminal.flag_groups import ENGINE, LEARN, SAMPLING, SCALE, SEED, SERVER


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
