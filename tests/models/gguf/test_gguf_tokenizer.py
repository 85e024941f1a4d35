"""The tokenizer of a GGUF file: how pre-tokenizers split words, and vocabularies that lie."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Sequence, Split

from paceline.errors import PacelineError, RequestError
from paceline.models.gguf.reader import GgufFile, read_gguf
from paceline.models.gguf.tokenizer import PRE_TOKENIZERS, gguf_tokenizer
from tests.models.model_files import config_of, random_tensors, write_gguf
from tests.models.strings import varied_strings


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


def test_texts_and_ids_of_wrong_types_are_reported(file: GgufFile) -> None:
    ours = gguf_tokenizer(file)
    with pytest.raises(RequestError, match="must be a text, not int"):
        ours.encode(5)  # type: ignore[arg-type]
    for ids in ([-1], [2**40], ["a"]):
        with pytest.raises(RequestError, match="Token ids"):
            ours.decode(ids)  # type: ignore[arg-type]
