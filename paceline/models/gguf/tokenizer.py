"""The Tokenizer of a GGUF file, from its metadata.

Three kinds of vocabularies are supported: `gpt2`, byte-level BPE with the file's merges, `llama`,
sentencepiece BPE with byte fallback, whose merges are derived from the scores, and `gemma4`, the same with
the file's merges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from paceline.errors import UnsupportedModelError
from paceline.models.families.fields import Fields
from paceline.models.files.mapped import damaged
from paceline.models.gguf.reader import GgufFile
from paceline.models.tokenizer import WORD_SPACE, Tokenizer

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # token types

GPT2_SPLIT = None  # the pattern built into the library's ByteLevel
_CONTRACTIONS_AND_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_SPLIT = _CONTRACTIONS_AND_WORDS + r"\p{N}" + _SIGNS_AND_SPACES
QWEN35_SPLIT = QWEN2_SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
# the line ends after signs are a word of their own
SEED_SPLIT = QWEN2_SPLIT.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
# several words with a space between them are one
EXAONE_MOE_SPLIT = (
    _CONTRACTIONS_AND_WORDS.replace(r"\p{L}+|", r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|")
    + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = _CONTRACTIONS_AND_WORDS + r"\p{N}{1,3}" + _SIGNS_AND_SPACES

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_WORD, _CONTRACTION = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
GPT4O_SPLIT = (  # a capital letter after a small one starts a new word
    f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}{_BEFORE_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    f"{_BEFORE_WORD}{_UPPER}*{_LOWER}+|{_BEFORE_WORD}{_UPPER}+{_LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# words of Chinese characters, and else those of GPT-4o without them; a sign does not take a slash with it
_NO_HAN = r"&&[^\p{Han}]]"
KIMI_SPLIT = r"\p{Han}+|" + GPT4O_SPLIT.replace(_UPPER, f"[{_UPPER}{_NO_HAN}").replace(
    _LOWER, f"[{_LOWER}{_NO_HAN}"
).replace(r"[\r\n/]*", r"[\r\n]*")
# letters that have cases; its authors left out some alphabets and the letters of formulas
_CASED = (
    r"(?:(?![\x{0560}-\x{0588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DF1E}])"
    r"[\p{Lu}\p{Ll}\p{Lt}])"
)
DEEPSEEK_WORDS = (
    r"[\r\n]",
    rf"\s?{_CASED}+",
    # from : to ~ are the letters a to z too, so words are split again at letters with accents, as published
    r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    r"[一-龥ࠀ-一가-\x{D7FF}]+",
)
DEEPSEEK_CODER_WORDS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_WORDS[-1])
_SIGN_AND_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"
DEEPSEEK3_SPLIT = (
    _SIGN_AND_LETTERS
    + r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# from the right, so that 1234567 is 1, 234 and 567
THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
AFMOE_LETTERS = (  # of alphabets without spaces between words, and Korean, as in llama.cpp
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{0E40}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}\x{1100}-\x{11FF}]+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is split into words before the merges of a byte-level vocabulary."""

    split: str | None  # a pattern; None: GPT-2's
    add_bos: bool = False  # the default, if the file has no add_bos_token
    whole_words_first: bool = False  # a word that is a token is used as it is, without merging
    digits_first: bool = False  # each digit is a word, whatever the pattern says
    before: tuple[str, ...] = ()  # patterns of words that are split off first, one after the other


PRE_TOKENIZERS = {
    "default": PreTokenizer(GPT2_SPLIT),
    "gpt-2": PreTokenizer(GPT2_SPLIT),
    # The published tokenizer also splits off each digit first, which matters for runs of white space
    # before a digit. We omit that step, as transformers does for this file.
    "smollm": PreTokenizer(GPT2_SPLIT),
    "qwen2": PreTokenizer(QWEN2_SPLIT),
    "qwen35": PreTokenizer(QWEN35_SPLIT),
    "deepseek-r1-qwen": PreTokenizer(QWEN2_SPLIT),
    "llama-bpe": PreTokenizer(LLAMA3_SPLIT, add_bos=True, whole_words_first=True),
    "lfm2": PreTokenizer(LLAMA3_SPLIT, add_bos=True, whole_words_first=True),
    "falcon-h1": PreTokenizer(LLAMA3_SPLIT, add_bos=True, whole_words_first=True),  # as in llama.cpp
    "dbrx": PreTokenizer(LLAMA3_SPLIT),  # OLMo 2, Phi 4
    "smaug-bpe": PreTokenizer(LLAMA3_SPLIT),  # SmolLM3
    "glm4": PreTokenizer(LLAMA3_SPLIT),
    "chatglm-bpe": PreTokenizer(LLAMA3_SPLIT),
    "olmo": PreTokenizer(GPT2_SPLIT),
    "exaone4": PreTokenizer(GPT2_SPLIT),
    "starcoder": PreTokenizer(GPT2_SPLIT, digits_first=True),
    "mellum2": PreTokenizer(GPT2_SPLIT, digits_first=True),
    "refact": PreTokenizer(GPT2_SPLIT, digits_first=True),  # Granite
    "command-r": PreTokenizer(GPT2_SPLIT, digits_first=True),
    "gpt-4o": PreTokenizer(GPT4O_SPLIT),  # gpt-oss
    "llama4": PreTokenizer(GPT4O_SPLIT),
    "tekken": PreTokenizer(TEKKEN_SPLIT, add_bos=True, whole_words_first=True),  # Mistral since Nemo
    "pixtral": PreTokenizer(TEKKEN_SPLIT, add_bos=True, whole_words_first=True),  # Mistral's with images
    "minimax-m2": PreTokenizer(GPT4O_SPLIT),
    "tiny_aya": PreTokenizer(GPT4O_SPLIT, before=(r"\d{1,3}(?=(?:\d{3})*\b)",)),  # Cohere
    "seed-coder": PreTokenizer(SEED_SPLIT),
    "exaone-moe": PreTokenizer(EXAONE_MOE_SPLIT),
    "afmoe": PreTokenizer(DEEPSEEK3_SPLIT, before=(THOUSANDS, AFMOE_LETTERS)),
    "kimi-k2": PreTokenizer(KIMI_SPLIT, whole_words_first=True),
    "deepseek-coder": PreTokenizer(r"\p{N}", before=DEEPSEEK_CODER_WORDS),
    "deepseek-llm": PreTokenizer(r"\p{N}", before=DEEPSEEK_WORDS),  # DeepSeek 1 and 2
    "deepseek-v3": PreTokenizer(DEEPSEEK3_SPLIT, before=(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+")),
}

for _name in ("llama3", "llama-v3", "falcon3"):
    PRE_TOKENIZERS[_name] = PRE_TOKENIZERS["llama-bpe"]
PRE_TOKENIZERS["cohere2moe"] = PRE_TOKENIZERS["tiny_aya"]
PRE_TOKENIZERS["hunyuan"] = PRE_TOKENIZERS["qwen2"]
PRE_TOKENIZERS["hunyuan-dense"] = PRE_TOKENIZERS["deepseek-v3"]

# files name one end token; these control tokens end an answer too, in models that have them
END_OF_ANSWER = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<turn|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|return|>",
    "<|call|>",
)
END_OF_PART = "<|end|>"  # ends an answer, too, but only a part of it in models that have `<|return|>`


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer of a GGUF file."""
    fields = Fields(file.metadata, file.path.name)
    kind = fields.text("tokenizer.ggml.model")
    if kind not in BUILDERS:
        raise UnsupportedModelError(
            f"{file.path.name}: tokenizer {kind!r} is not supported. Supported are {', '.join(BUILDERS)}; "
            f"or give a folder with safetensors and tokenizer.json."
        )
    vocabulary = _Vocabulary(file)
    backend = BUILDERS[kind](vocabulary)
    backend.add_special_tokens(vocabulary.added(CONTROL, special=True))
    backend.add_tokens(vocabulary.added(USER_DEFINED, special=False))
    ends = [*END_OF_ANSWER, *([] if "<|return|>" in vocabulary.control else [END_OF_PART])]
    eos_ids = {vocabulary.tokens.index(text) for text in ends if text in vocabulary.control}
    for name in ("eos", "eot", "eom"):
        if (token_id := vocabulary.special_id(name)) is not None:
            eos_ids.add(token_id)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: vocabulary.special_id(key) for name, key in names.items()}
    special_tokens = {name: vocabulary.tokens[i] for name, i in ids.items() if i is not None}
    keys = ("tokenizer.chat_template", "tokenizer.chat_template.tool_use")
    templates = (fields.text(key) if fields.has(key) else None for key in keys)
    return Tokenizer(backend, special_tokens, eos_ids, *templates)


class _Vocabulary:
    """The vocabulary lists of a GGUF file, checked against each other."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.fields = Fields(file.metadata, file.path.name)
        self.tokens = self.texts("tokenizer.ggml.tokens")
        types = file.metadata.get("tokenizer.ggml.token_type", np.full(len(self.tokens), NORMAL))
        if not isinstance(types, np.ndarray) or types.shape != (len(self.tokens),):
            raise damaged(file.path, "tokenizer.ggml.token_type does not have one entry per token")
        self.types: list[int] = types.tolist()
        pairs = zip(self.tokens, self.types, strict=True)
        self.control = {token for token, kind in pairs if kind == CONTROL}

    def texts(self, key: str) -> list[str]:
        values = self.file.metadata.get(key)
        if not isinstance(values, list) or not values or not all(type(value) is str for value in values):
            raise damaged(self.file.path, f"{key} is missing or is not a list of texts")
        return values  # type: ignore[return-value]

    def special_id(self, name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if not self.fields.has(key):
            return None
        return self.fields.integer(key, least=0, most=len(self.tokens) - 1)

    def added(self, kind: int, special: bool) -> list[tokenizers.AddedToken]:
        chosen = (
            token
            for token, token_type in zip(self.tokens, self.types, strict=True)
            if token_type == kind and token
        )
        return [tokenizers.AddedToken(token, normalized=False, special=special) for token in chosen]

    def bpe(self, merges: Sequence[tuple[str, str]], **options: bool) -> models.BPE:
        ids = {token: number for number, token in enumerate(self.tokens)}
        try:
            return models.BPE(vocab=ids, merges=merges, **options)
        except Exception as error:  # the library raises bare Exception
            raise damaged(
                self.file.path, f"its vocabulary and merges do not fit ({str(error)[:200]})"
            ) from error

    def bos_processor(self, default: bool) -> processors.TemplateProcessing | None:
        """The processor that adds the begin-of-sequence token; None if this vocabulary has no use for it."""
        bos = self.special_id("bos")
        if bos is None or not self.fields.flag("tokenizer.ggml.add_bos_token", default):
            return None
        token = self.tokens[bos]
        return processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, bos)])


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    name = vocabulary.fields.text("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{vocabulary.file.path.name}: pre-tokenizer {name!r} is not supported. Supported are "
            f"{', '.join(PRE_TOKENIZERS)}; or give a folder with safetensors and tokenizer.json."
        )
    style = PRE_TOKENIZERS[name]
    merges = _listed_merges(vocabulary)
    backend = tokenizers.Tokenizer(vocabulary.bpe(merges, ignore_merges=style.whole_words_first))
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style.split is None)
    steps: list[pre_tokenizers.PreTokenizer] = []
    if style.digits_first:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    for pattern in (*style.before, *([style.split] if style.split is not None else [])):
        steps.append(pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated"))
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, to_bytes]) if steps else to_bytes
    backend.decoder = decoders.ByteLevel()
    if (processor := vocabulary.bos_processor(default=style.add_bos)) is not None:
        backend.post_processor = processor
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    return _pieces(vocabulary, _merges(vocabulary))


def _gemma4(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    return _pieces(vocabulary, _listed_merges(vocabulary))


def _pieces(vocabulary: _Vocabulary, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """BPE of sentencepiece's pieces, in which spaces are a character of their own, with byte fallback."""
    if not {f"<0x{byte:02X}>" for byte in range(256)} <= set(vocabulary.tokens):
        raise UnsupportedModelError(
            f"{vocabulary.file.path.name}: its sentencepiece vocabulary has no byte tokens. "
            f"Give a folder with safetensors and tokenizer.json instead."
        )
    backend = tokenizers.Tokenizer(vocabulary.bpe(merges, fuse_unk=True, byte_fallback=True))
    prefix = vocabulary.fields.flag("tokenizer.ggml.add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=WORD_SPACE, prepend_scheme="first" if prefix else "never", split=False
    )
    steps = [decoders.Replace(WORD_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + ([decoders.Strip(content=" ", left=1)] if prefix else []))
    if (processor := vocabulary.bos_processor(default=True)) is not None:
        backend.post_processor = processor
    return backend


def _listed_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that the file has, best first."""
    lines = vocabulary.texts("tokenizer.ggml.merges")
    if not all(line.count(" ") == 1 for line in lines):
        raise damaged(vocabulary.file.path, "tokenizer.ggml.merges has an entry that is not a pair")
    return [(left, right) for left, right in (line.split(" ") for line in lines)]


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The merges that the scores imply: every split of a token into two tokens, best score first."""
    scores = vocabulary.file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or scores.shape != (len(vocabulary.tokens),):
        raise damaged(vocabulary.file.path, "tokenizer.ggml.scores does not have one number per token")
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    found = []
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, scores.tolist(), strict=True):
        if kind != NORMAL:
            continue
        cuts = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ids and token[i:] in ids]
        cuts.sort(key=lambda cut: (ids[cut[0]], ids[cut[1]]))
        found += [(score, len(left), len(right), (left, right)) for left, right in cuts]
    found.sort(key=lambda merge: merge[:3], reverse=True)
    return [pair for *_, pair in found]


BUILDERS = {"gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4}
