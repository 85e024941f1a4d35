"""The tokenizer: equal to that of transformers, byte-exact, for any text."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from paceline.errors import CheckpointError
from paceline.models.registry import is_pulled, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer, byte_alphabet, folder_tokenizer
from tests.large import repeated
from tests.models.strings import BROKEN, varied_strings
from tests.their_gguf import read_once

REAL_MODELS = ["smollm2-135m", *repeated("qwen2.5-coder-1.5b")]
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": '<now> & "später"', "parameters": {}}}
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Zwei Sätze: 你好 👋"}],
    [
        {"role": "user", "content": "a < b & c"},
        {"role": "assistant", "content": "<b>yes</b>\n"},
        {"role": "user", "content": ""},
    ],
]


@cache
def real(model: str) -> tuple[Tokenizer, Any]:
    """Our tokenizer and transformers', from the same file."""
    if model != "smollm2-135m" and not is_pulled(model):
        pytest.skip(f"{model} is not in PACELINE_HOME; fetch it with `paceline models pull {model}`")
    import transformers

    path = resolve(model)
    with read_once(words=True):
        theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    return load_tokenizer(path), theirs


@pytest.mark.real
@pytest.mark.parametrize("model", REAL_MODELS)
def test_ids_and_texts_are_those_of_transformers(model: str) -> None:
    ours, theirs = real(model)
    for text in varied_strings():
        ids = ours.encode(text)
        assert ids == theirs.encode(text), repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), repr(text)


@pytest.mark.real
@pytest.mark.parametrize("model", REAL_MODELS)
def test_broken_unicode_is_read_as_replacement_characters(model: str) -> None:
    ours, theirs = real(model)
    for text in BROKEN:
        mended = "".join("\ufffd" if "\ud800" <= character <= "\udfff" else character for character in text)
        assert ours.encode(text) == theirs.encode(mended)


@pytest.mark.real
@pytest.mark.parametrize("model", REAL_MODELS)
def test_chat_prompts_are_those_of_transformers(model: str) -> None:
    ours, theirs = real(model)
    chats = CHATS + [[{"role": "user", "content": text}] for text in varied_strings()]
    for messages in chats:
        for generation in (True, False):
            expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation)
            assert ours.apply_chat_template(messages, add_generation_prompt=generation) == expected
        if "tools" in (ours.chat_template or ""):  # else theirs leaves them out, and ours says so
            with_tools = theirs.apply_chat_template(
                messages, TOOLS, tokenize=False, add_generation_prompt=True
            )
            assert ours.apply_chat_template(messages, tools=TOOLS) == with_tools


@pytest.mark.real
@pytest.mark.parametrize("model", REAL_MODELS)
def test_bytes_of_tokens_join_to_the_text(model: str) -> None:
    ours, _ = real(model)
    for text in varied_strings(300):
        ids = ours.encode(text)
        joined = b"".join(ours.token_bytes(token_id) for token_id in ids)
        assert joined.decode(errors="replace") == ours.decode(ids, skip_special_tokens=False)
    assert ours.token_bytes(-1) == ours.token_bytes(10**9) == b""


@pytest.mark.real
def test_a_folder_that_transformers_saved_gives_the_same_ids(tmp_path: Path) -> None:
    ours, theirs = real("smollm2-135m")
    theirs.save_pretrained(tmp_path)
    saved = folder_tokenizer(tmp_path)
    for text in varied_strings(200):
        assert saved.encode(text) == ours.encode(text)
    assert saved.apply_chat_template(CHATS[1]) == ours.apply_chat_template(CHATS[1])
    assert (saved.bos_id, saved.eos_ids) == (1, {2})


@pytest.mark.real
def test_special_tokens_of_the_default_model() -> None:
    ours, _ = real("smollm2-135m")
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (49152, 1, {0, 2})
    assert ours.is_special(2)
    assert not ours.is_special(100)
    assert ours.decode([2]) == ""
    assert ours.decode([2], skip_special_tokens=False) == "<|im_end|>"


@pytest.mark.real
def test_where_the_published_smollm_tokenizer_differs() -> None:
    """It splits off digits first, as llama.cpp does; transformers leaves that out for GGUF files.

    The two agree unless a digit follows two or more characters of white space, or is not ASCII.
    """
    ours, theirs = real("smollm2-135m")
    published = tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str())
    published.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in varied_strings():
        white_then_digit = re.search(r"\s\s\d", text)
        other_digit = any(character.isnumeric() and not character.isascii() for character in text)
        if not white_then_digit and not other_digit:
            assert ours.encode(text) == published.encode(text).ids, repr(text)
    assert ours.encode("\n\n1.") != published.encode("\n\n1.").ids


def test_the_byte_alphabet_is_that_of_the_library() -> None:
    assert set(byte_alphabet()) == set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


def write_tokenizer_folder(folder: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("a", "b")]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<turn>"])
    backend.enable_truncation(2)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "eos_token": {"content": "<end>"},
        "chat_template": "{{ eos_token }}{{ messages[0].content }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [4]}))


def test_a_folder_gives_ids_ends_and_template(tmp_path: Path) -> None:
    write_tokenizer_folder(tmp_path)
    ours = folder_tokenizer(tmp_path)
    assert ours.encode("abab<turn>") == [2, 2, 4]  # never truncated
    assert (ours.vocab_size, ours.eos_ids, ours.bos_id) == (5, {3, 4}, None)
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "<end>x"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert folder_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]) == "jinja"


def test_a_folder_of_a_model_with_images_and_older_files(tmp_path: Path) -> None:
    """As Gemma 3 and Mistral Small 3.1 were published: templates and ends are in other files."""
    write_tokenizer_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": [4]}}))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ eos_token }}json"}))
    ours = folder_tokenizer(tmp_path)
    assert ours.eos_ids == {3, 4}
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "<end>json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert folder_tokenizer(tmp_path).apply_chat_template([{"role": "user", "content": "x"}]) == "jinja"


def test_conversations_with_tools_may_have_a_template_of_their_own(tmp_path: Path) -> None:
    """As those of Hermes and Command R have, in a list or in a folder; transformers takes it too."""
    write_tokenizer_folder(tmp_path)
    templates = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "documents"}
    listed = [{"name": name, "template": own} for name, own in templates.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    chat, tools = [{"role": "user", "content": "x"}], [{"type": "function"}]
    ours = folder_tokenizer(tmp_path)
    assert [ours.apply_chat_template(chat, tools=own) for own in (None, tools)] == ["plain", "1 tools"]
    assert "tools" in (ours.tool_template or "")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }} in a file")
    assert folder_tokenizer(tmp_path).apply_chat_template(chat, tools=tools) == "1 in a file"


def test_a_folder_without_or_with_a_damaged_tokenizer_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        folder_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        folder_tokenizer(tmp_path)
