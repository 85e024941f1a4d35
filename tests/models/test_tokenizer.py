"""The tokenizer: equal to that of transformers, byte-exact, for any text."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from paceline.errors import CheckpointError, PacelineError, RequestError, UnsupportedModelError
from paceline.models.gguf.reader import GgufFile, read_gguf
from paceline.models.gguf.tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from paceline.models.registry import is_pulled, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer, byte_alphabet, folder_tokenizer
from tests.large import repeated
from tests.models.model_files import config_of, random_tensors, write_gguf
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


# ---- vocabularies of sentencepiece, as llama 2 and mistral have them


def write_sentencepiece(path: Path) -> Path:
    """A small vocabulary with scores and byte tokens, as a GGUF file."""
    words = [
        "▁",
        "▁t",
        "▁the",
        "he",
        "in",
        "ing",
        "▁a",
        "er",
        "re",
        "th",
        "the",
        "ab",
        "abc",
        "bc",
        "▁▁",
        "bb",
    ]
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "[INST]"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))] + [0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters)), 3]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = write_sentencepiece(tmp_path / "spm.gguf")
    ours = gguf_tokenizer(read_gguf(path))
    architecture, vocabulary, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, vocabulary)
    for text in [*varied_strings(400), "the there abc abbc [INST] the thing[INST]  other"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_sentencepiece_adds_the_begin_token_and_spells_bytes(tmp_path: Path) -> None:
    ours = gguf_tokenizer(read_gguf(write_sentencepiece(tmp_path / "spm.gguf")))
    ids = ours.encode("the ü")
    assert ids[0] == ours.bos_id == 1
    assert b"".join(ours.token_bytes(token_id) for token_id in ids[1:]).decode() == " the ü"
    assert ours.decode(ids) == "the ü"


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    """As Gemma's files ask for."""
    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    file.metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = gguf_tokenizer(file)
    ids = ours.encode("the the")
    assert b"".join(ours.token_bytes(token_id) for token_id in ids[1:]) == b"the the"
    assert ours.decode(ids) == "the the"


def test_gemma_4_merges_pieces_in_the_order_of_the_file(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    merges = ["t h", "th e", "▁ the", "▁ ▁", "a b", "b c", "i n", "in g"]
    file.metadata.update({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges})
    file.metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = gguf_tokenizer(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    vocabulary = {str(token): number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = GemmaTokenizer(vocabulary, pairs, bos_token="<s>", eos_token="</s>", pad_token="<unk>")
    for text in [*varied_strings(200), "the there  abc thing\n\n other"]:
        ids = ours.encode(text, add_special_tokens=False)
        if 0 not in ids and "[INST]" not in text:  # control tokens are another matter
            assert ids == theirs.encode(text, add_special_tokens=False), repr(text)
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("the")[0] == 1


def test_sentencepiece_without_byte_tokens_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    file.metadata["tokenizer.ggml.tokens"][5] = "other"  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="byte tokens"):
        gguf_tokenizer(file)


# ---- damaged and unknown vocabularies


@pytest.fixture
def file(tmp_path: Path) -> GgufFile:
    return read_gguf(write_gguf(tmp_path / "tiny.gguf", "llama", random_tensors(config_of("llama"))))


def test_a_tiny_vocabulary_merges_and_knows_its_control_tokens(file: GgufFile) -> None:
    ours = gguf_tokenizer(file)
    assert ours.encode("abc<|im_end|>ab") == [79, 1, 78]
    assert ours.eos_ids == {0, 1}
    assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "user: x\n"


def test_deepseek_3_splits_off_digits_by_threes_and_a_sign_with_its_letters(file: GgufFile) -> None:
    file.metadata["tokenizer.ggml.pre"] = "deepseek-v3"
    merges = ["1 2", "12 3", "123 4", "/ a", "a b", "/a b", "a 1"]
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[-9:] = ["12", "123", "1234", "/a", "/ab", "a1", "x", "ab", "abc"]
    file.metadata["tokenizer.ggml.merges"] = merges
    ours = gguf_tokenizer(file)

    def pieces(text: str) -> list[str]:
        return [ours.decode([token]) for token in ours.encode(text, add_special_tokens=False)]

    assert pieces("1234") == ["123", "4"]
    assert pieces("/ab/ab") == ["/ab", "/ab"]
    assert pieces("a1") == ["a", "1"]


def test_kimi_splits_as_its_own_pattern_does() -> None:
    """Held to the pattern that Moonshot publishes for tiktoken, run by another engine."""
    import regex

    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
    before, contraction = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = [f"{before}{upper}*{lower}+{contraction}", f"{before}{upper}+{lower}*{contraction}"]
    rest = [r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
    published = regex.compile("|".join([r"[\p{Han}]+", *words, *rest]), regex.V1)
    ours = Split(Regex(PRE_TOKENIZERS["kimi-k2"].split), behavior="isolated")
    for text in [
        *varied_strings(300),
        "中文ABCdef漢字かなカナ12345 don't/\n//x  \n\n y",
        "Hello世界 ÉCOLE éa 1,234",
    ]:
        assert [word for word, _ in ours.pre_tokenize_str(text)] == published.findall(text), repr(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world! 2024\n", ["Hello", ",", " world", "!", " ", "2", "0", "2", "4", "\n"]),
        ("中文abc 한국어", ["中文", "abc", " ", "한국어"]),
        ("Ответ: don't  ", ["Ответ", ":", " don", "'", "t", "  "]),
        ("wörld", ["w", "ö", "rld"]),  # by the range from : to ~, which has a to z
        ("Ελλάδα ქართული", ["Ελλάδα", " ", "ქართული"]),  # Georgian is none of the alphabets with cases
    ],
)
def test_deepseek_2_splits_words_step_by_step(text: str, words: list[str]) -> None:
    assert split_by("deepseek-llm", text) == words


def test_deepseek_coder_splits_off_letters_signs_and_each_digit() -> None:
    words = ["def", " f", "1", "2", "(", "wörld", "):", "\n", " ", " ", "漢字", " #", "か"]
    assert split_by("deepseek-coder", "def f12(wörld):\n  漢字 #か") == words


def test_trinity_splits_off_thousands_and_letters_of_alphabets_without_spaces() -> None:
    words = ["12", "345", "678", " a", "1", " b", "/c", " ", "漢字かな한국", "x", ".\n"]
    assert split_by("afmoe", "12345678 a1 b/c 漢字かな한국x.\n") == words


def test_tiny_aya_splits_off_thousands() -> None:
    assert split_by("tiny_aya", "1234567 don't 12") == ["1", "234", "567", " don't", " ", "12"]


# as the models' authors publish them
PUBLISHED = {
    "seed-coder": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    "exaone-moe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_splits_are_those_of_the_published_patterns(name: str) -> None:
    import regex

    published = regex.compile(PUBLISHED[name])
    for text in [*varied_strings(300), "a = 1;\r\n\n b++ // c/\n/d", "한국어 문장 두 개, don't  \n\n3 é"]:
        assert split_by(name, text) == [match[0] for match in published.finditer(text)], repr(text)


def split_by(name: str, text: str) -> list[str]:
    style = PRE_TOKENIZERS[name]
    assert style.split is not None
    steps = [Split(Regex(pattern), behavior="isolated") for pattern in (*style.before, style.split)]
    return [word for word, _ in Sequence(steps).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("falcon-h1", "llama-bpe"),
        ("falcon3", "llama-bpe"),
        ("pixtral", "tekken"),
        ("smaug-bpe", "dbrx"),
        ("chatglm-bpe", "glm4"),
        ("exaone4", "gpt-2"),
        ("starcoder", "refact"),
        ("minimax-m2", "gpt-4o"),
        ("mellum2", "refact"),
        ("cohere2moe", "tiny_aya"),
        ("hunyuan", "qwen2"),
        ("hunyuan-dense", "deepseek-v3"),
    ],
)
def test_vocabularies_that_split_as_others_do(file: GgufFile, name: str, like: str) -> None:
    found = []
    for pre in (name, like):
        file.metadata["tokenizer.ggml.pre"] = pre
        found.append([gguf_tokenizer(file).encode(text) for text in ("abc ab", "aBc 12345", "ab\n\nc")])
    assert found[0] == found[1]
    assert (found[0][0][0] == gguf_tokenizer(file).bos_id) == PRE_TOKENIZERS[name].add_bos


def test_tekken_splits_off_each_digit_and_words_at_large_letters(file: GgufFile) -> None:
    file.metadata["tokenizer.ggml.pre"] = "tekken"
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    tokens[-5:] = ["12", "aB", "Ba", "ab", "abc"]
    file.metadata["tokenizer.ggml.merges"] = ["1 2", "a B", "B a"]
    ours = gguf_tokenizer(file)
    ids = ours.encode("12aBa", add_special_tokens=False)
    assert [ours.decode([token]) for token in ids] == ["1", "2", "a", "Ba"]
    assert ours.encode("a")[0] == ours.bos_id


def test_llama_3_vocabularies_start_with_their_begin_token(file: GgufFile) -> None:
    file.metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert gguf_tokenizer(file).encode("abc") == [0, 79]
    assert gguf_tokenizer(file).encode("abc", add_special_tokens=False) == [79]
    file.metadata["tokenizer.ggml.add_bos_token"] = False
    assert gguf_tokenizer(file).encode("abc") == [79]


@pytest.mark.parametrize(
    ("pre", "pair", "is_one_word"),
    [
        ("gpt-2", "12", True),
        ("olmo", "aB", True),
        ("refact", "12", False),  # each digit is a word
        ("command-r", "12", False),
        ("dbrx", "12", True),
        ("glm4", "aB", True),
        ("gpt-4o", "aB", False),  # a word begins with a large letter after a small one
        ("gpt-4o", "Ba", True),
    ],
)
def test_pre_tokenizers_say_what_may_be_merged(
    file: GgufFile, pre: str, pair: str, is_one_word: bool
) -> None:
    tokens = [*file.metadata["tokenizer.ggml.tokens"][:-1], pair]  # type: ignore[index]
    changed = {"tokens": tokens, "merges": [f"{pair[0]} {pair[1]}"], "pre": pre}
    file.metadata.update({f"tokenizer.ggml.{key}": value for key, value in changed.items()})
    ours = gguf_tokenizer(file)
    assert ours.encode(pair) == ([79] if is_one_word else [tokens.index(letter) for letter in pair])


def test_a_part_of_an_answer_does_not_end_it_in_models_that_say_return(file: GgufFile) -> None:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    tokens[:2] = ["<|end|>", "<end_of_turn>"]  # type: ignore[index]
    del file.metadata["tokenizer.ggml.eos_token_id"]
    assert gguf_tokenizer(file).eos_ids == {0, 1}
    tokens[1] = "<|return|>"  # type: ignore[index]
    assert gguf_tokenizer(file).eos_ids == {1}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", "tokenizer 'bert' is not supported. Supported are gpt2, llama"),
        ("model", None, "tokenizer.ggml.model"),
        ("pre", "unheard-of", "pre-tokenizer 'unheard-of' is not supported"),
        ("tokens", ["a", 5], "tokens is missing or is not a list of texts"),
        ("merges", ["a"], "not a pair"),
        ("merges", ["a b", "no such"], "do not fit"),
        ("merges", None, "merges is missing"),
        ("token_type", [1], "one entry per token"),
        ("eos_token_id", 80, "eos_token_id"),
        ("bos_token_id", -1, "bos_token_id"),
    ],
)
def test_a_vocabulary_that_lies_is_reported(file: GgufFile, key: str, value: object, message: str) -> None:
    file.metadata[f"tokenizer.ggml.{key}"] = value  # type: ignore[assignment]
    with pytest.raises(PacelineError, match=message):
        gguf_tokenizer(file)


# ---- folders


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


def test_texts_and_ids_of_wrong_types_are_reported(file: GgufFile) -> None:
    ours = gguf_tokenizer(file)
    with pytest.raises(RequestError, match="must be a text, not int"):
        ours.encode(5)  # type: ignore[arg-type]
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(RequestError, match="Token ids"):
            ours.decode(ids)  # type: ignore[arg-type]
