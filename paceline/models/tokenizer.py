"""Tokenizer: text to token ids and back, with the `tokenizers` library."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from paceline.errors import CheckpointError, RequestError, UnsupportedModelError
from paceline.models.chat import TEMPLATES, ChatTemplate, Message
from paceline.models.files.mapped import damaged, read_json

SURROGATES = re.compile("[\ud800-\udfff]")
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
WORD_SPACE = "▁"  # how sentencepiece vocabularies spell a space
NOT_LATIN = 0x2400  # a character that Latin-1 does not have
NORMALIZED = 4  # characters that a normalizer may merge into one, at most
HEAD_CHARACTERS = 2  # per allowed token: of a longer text, this much is encoded first


class TooManyTokens(RequestError):
    """A text has too many tokens: `count`, or more than that if it is not `exact`."""

    def __init__(self, count: int, most: int, exact: bool) -> None:
        super().__init__(
            f"the prompt has {'' if exact else 'more than '}{count} tokens, and at most {most} are taken. "
            "Shorten the prompt."
        )
        self.count = count
        self.exact = exact


class Tokenizer:
    """A model's vocabulary, special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        chat_template: str | None,
        tool_template: str | None = None,
    ) -> None:
        """`special_tokens` has the texts of bos_token, eos_token, ..., if the model has them.

        `tool_template` is the chat template of conversations with tools, if they have one of their own.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added: dict[int, tokenizers.AddedToken] = backend.get_added_tokens_decoder()
        self._template = ChatTemplate(chat_template, special_tokens) if chat_template else None
        self._tool_template = ChatTemplate(tool_template, special_tokens) if tool_template else None
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_id: int | None = (
            self.id_of(special_tokens["bos_token"]) if "bos_token" in special_tokens else None
        )
        self.eos_ids = frozenset(eos_ids)
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.tool_template = tool_template or chat_template

    def encode(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """The token ids of `text`. Special tokens in the text are parsed as such.

        Lone surrogates are replaced by U+FFFD. TooManyTokens if there are more than `most` ids, raised as
        soon as that is certain. The GIL is released meanwhile.
        """
        if not isinstance(text, str):
            raise RequestError(f"A prompt must be a text, not {type(text).__name__}.")
        text = replace_surrogates(text)
        if most is not None:
            self._check_heads(text, most)
        encoding = self._encoding(text, add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), most, exact=True)
        return list(encoding.ids)

    def _check_heads(self, text: str, most: int) -> None:
        """TooManyTokens if the length of a text, or the tokens of its head, show that it has too many.

        The end of the head may be tokenized differently within the whole text, but never into less than half
        as many tokens: more than twice `most` are certain to be too many.
        """
        if len(text) > most * self._max_characters:
            raise TooManyTokens(most, most, exact=False)
        size = HEAD_CHARACTERS * most
        while size < len(text):
            count = len(self._encoding(text[:size], add_special_tokens=False))
            if count > 2 * most:
                raise TooManyTokens(count // 2, most, exact=False)
            size *= 4

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        # `encode` would hold the GIL, and compute the offset of each token
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD."""
        try:  # `decode` would hold the GIL
            (text,) = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
            return str(text)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"Token ids must be integers from 0 to {self.vocab_size - 1}: {error}."
            ) from error

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token, not always whole characters; empty for an id without a token.

        The bytes of all tokens, joined and decoded, are the text of `decode` (except for the leading space
        that sentencepiece vocabularies add to a text and drop again).
        """
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not text."""
        return token_id in self._added and bool(self._added[token_id].special)

    def id_of(self, token: str) -> int | None:
        """The id of the token with this text, or None."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt for a conversation, by the model's chat template. Encode it without special tokens."""
        template = (self._tool_template if tools else None) or self._template
        if template is None:
            raise RequestError("This model has no chat template: give it a plain prompt instead of messages.")
        return replace_surrogates(
            template.render(
                messages, add_generation_prompt, tools, continue_final_message, chat_template_kwargs
            )
        )

    @property
    def template_variables(self) -> frozenset[str]:
        """The variables of the chat template that chat_template_kwargs may set."""
        return frozenset() if self._template is None else self._template.variables

    @cached_property
    def _max_characters(self) -> int:
        """The most characters of a text that one token may stand for, before normalization."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else NORMALIZED * longest

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of every id: bytes [vocab_size]."""
        spell = _speller(self._backend)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            table[token_id] = token.encode() if token_id in self._added else spell(token)
        return table


def replace_surrogates(text: str) -> str:
    """`text` with every lone surrogate replaced by U+FFFD."""
    try:
        text.encode()  # several times faster than a search
        return text
    except UnicodeEncodeError:
        return SURROGATES.sub("\ufffd", text)


def byte_alphabet() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary (GPT-2's alphabet).

    Printable Latin-1 characters are their own bytes; the other bytes, in order, have the characters from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _speller(backend: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """The function from a token's text in the vocabulary to its bytes, for this kind of decoder."""
    state = backend.decoder.__getstate__() if backend.decoder is not None else b""
    if b'"ByteLevel"' in state:
        return _byte_level_speller()
    if b'"ByteFallback"' in state:
        return _spell_with_byte_fallback
    raise UnsupportedModelError(
        "The tokenizer is neither byte-level BPE nor sentencepiece with byte fallback, so its text cannot be "
        "streamed byte by byte. Use a model of a supported family."
    )


def _byte_level_speller() -> Callable[[str], bytes]:
    """Translates and encodes in C: a vocabulary has 150,000 tokens."""
    alphabet = {ord(character): byte for character, byte in byte_alphabet().items()}
    no_byte = dict.fromkeys(set(range(256)) - alphabet.keys(), NOT_LATIN)
    table = alphabet | no_byte

    def spell(token: str) -> bytes:
        try:
            return token.translate(table).encode("latin-1")
        except UnicodeEncodeError:
            return token.encode()  # an unused placeholder

    return spell


def _spell_with_byte_fallback(token: str) -> bytes:
    if match := BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(WORD_SPACE, " ").encode()


def folder_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder: tokenizer.json and its configuration files."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no tokenizer.json. Fetch the whole model, or save its tokenizer there with "
            f"transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise damaged(path, f"the tokenizers library cannot read it ({str(error)[:200]})") from error
    settings = _optional_json(folder / "special_tokens_map.json")  # older files have some tokens there only
    own = _optional_json(folder / "tokenizer_config.json")
    settings |= {name: value for name, value in own.items() if value is not None}
    special_tokens = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            special_tokens[name] = text
    eos_ids = set(_ids(_optional_json(folder / "generation_config.json").get("eos_token_id")))
    config = _optional_json(folder / "config.json")
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        eos_ids |= set(_ids(values.get("eos_token_id")))
    if (
        "eos_token" in special_tokens
        and (eos := backend.token_to_id(special_tokens["eos_token"])) is not None
    ):
        eos_ids.add(eos)
    return Tokenizer(backend, special_tokens, eos_ids, *_folder_templates(folder, settings))


def _folder_templates(folder: Path, settings: Mapping[str, object]) -> tuple[str | None, str | None]:
    """The chat template, and that of conversations with tools: in tokenizer_config.json or in other files."""
    listed, found = settings.get("chat_template"), dict[str, object]()
    if isinstance(listed, list):
        found = {str(own.get("name")): own.get("template") for own in listed if isinstance(own, dict)}
    jinja, with_processor, with_tools = (folder / name for name in TEMPLATES)
    default = found.get("default", listed)
    if jinja.is_file():
        default = _text(jinja)
    elif with_processor.is_file():  # of models with images
        default = read_json(with_processor).get("chat_template", default)
    tools = _text(with_tools) if with_tools.is_file() else found.get("tool_use")
    return default if isinstance(default, str) else None, tools if isinstance(tools, str) else None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, f"it cannot be read ({error})") from error


def _optional_json(path: Path) -> dict[str, object]:
    return read_json(path) if path.is_file() else {}


def _ids(value: object) -> list[int]:
    """The ids of a value that may be one id or a list of them."""
    values = value if isinstance(value, list) else [value]
    return [entry for entry in values if type(entry) is int and entry >= 0]
