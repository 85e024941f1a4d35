"""From params to grammars that can be followed: compiled once, kept, and never for long."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from paceline.constrain.constraint import Constraint, Endings
from paceline.constrain.limits import GrammarLimits
from paceline.constrain.sources import grammar_source
from paceline.constrain.trial import STACK_BYTES, GrammarTrial
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import GrammarError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 128
CACHED_BYTES = 1 << 20  # of their sources
TOKENIZED = 2048  # characters of a forced text at a time: a schema may force a text without end


class GrammarTokenizer(Protocol):
    """The part of a tokenizer that constraints need."""

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class Grammar:
    """A compiled grammar, from which any number of outputs can start."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    def start(self, ignore_eos: bool = False) -> Constraint:
        """A constraint at the start of a text. `ignore_eos`: it ends only where nothing else may follow."""
        endings = Endings(self._eos_ids, eager=not ignore_eos)
        return Constraint(self._matcher.deep_copy(), self._vocab_size, endings)

    @property
    def usable(self) -> bool:
        """Whether an output can start: false once a request has used up what the grammar may cost in all."""
        first = self.start()
        try:
            return bool(first.forced()) or bool(first.mask().any())
        except GrammarError:
            return False


class GrammarCompiler:
    """Compiles what requests ask for. Any thread may call it; it takes one grammar at a time."""

    def __init__(
        self, tokenizer: GrammarTokenizer, vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        """`vocab_size` is the model's: ids that the tokenizer does not have are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._compiling = threading.Lock()
        self._changing = threading.Lock()  # of the cache
        self._cache: OrderedDict[str, Grammar] = OrderedDict()  # by source, least recently used first
        self._trial = GrammarTrial(self._limits.seconds)

    def compile(self, params: StructuredOutputsParams, *, trusted: bool = True) -> Grammar:
        """The grammar that the params mean. RequestError if there is none, or if it is beyond the limits.

        One that is not `trusted` is first tried in a process that can be killed.
        """
        try:
            source = grammar_source(params, self._limits)
            found = self._cached(source)
            if found is not None:
                return found
            with self._compiling:
                found = self._cached(source)
                if found is None:
                    vocabulary = self._vocabulary
                    if not trusted:
                        self._try(source)
                    found = self._compiled(source, vocabulary, self._limits.seconds if trusted else None)
                self._keep(source, found)
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs the package llguidance: pip install 'paceline[serve]'."
            ) from error
        return found

    def prepare(self) -> None:
        """Have ready what the first grammar would wait for: the library holds up other threads for it."""
        with suppress(ImportError, RequestError):  # a request that needs a grammar is told
            _ = self._vocabulary

    def _cached(self, source: str) -> Grammar | None:
        with self._changing:
            found = self._cache.get(source)
            if found is not None and not found.usable:
                del self._cache[source]
                return None
            if found is not None:
                self._cache.move_to_end(source)
            return found

    def _keep(self, source: str, grammar: Grammar) -> None:
        with self._changing:
            self._cache[source] = grammar
            self._cache.move_to_end(source)
            while len(self._cache) > CACHED_GRAMMARS or sum(map(len, self._cache)) > CACHED_BYTES:
                self._cache.popitem(last=False)

    def close(self) -> None:
        """End the process in which grammars are tried."""
        self._trial.kill()
        with self._compiling:
            self._trial.close()

    def _try(self, source: str) -> None:
        fault = self._trial.fault_of(source, self._library_limits)
        if fault is not None:
            raise RequestError(f"the grammar cannot be compiled: {fault}. Use a simpler one.")

    def _compiled(self, source: str, vocabulary: LLTokenizer, seconds: float | None) -> Grammar:
        """The grammar, compiled on a thread whose stack is deep enough, or refused if that takes too long.

        The library lets other threads run meanwhile. It cannot be interrupted.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **self._library_limits)
        made: list[LLMatcher] = []

        def work() -> None:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
            matcher.deep_copy().compute_ff_tokens()  # the first step is often the costliest: it counts too
            made.append(matcher)

        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="paceline-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(before)
        thread.join(seconds)
        if not made:
            raise RequestError(f"the grammar takes longer than {seconds:g} s to compile. Use a simpler one.")
        if made[0].is_error():
            raise RequestError(f"the grammar cannot be compiled: {_in_one_line(made[0].get_error())}")
        grammar = Grammar(made[0], self._vocab_size, sorted(self._tokenizer.eos_ids))
        if not grammar.usable:
            raise RequestError("the grammar allows no text at all, or its first token costs too much.")
        return grammar

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The tokens as the library wants them."""
        from llguidance import LLTokenizer

        if not self._tokenizer.eos_ids:
            raise RequestError(
                "structured_outputs needs a model with an end-of-sequence token, and this one has none."
            )
        return LLTokenizer(
            _Vocabulary(self._tokenizer, self._vocab_size),  # type: ignore[arg-type]
            eos_token=sorted(self._tokenizer.eos_ids),
        )

    @property
    def _library_limits(self) -> dict[str, Any]:
        names = "initial_lexer_fuel step_lexer_fuel step_max_items max_items_in_row max_lexer_states"
        return {name: getattr(self._limits, name) for name in [*names.split(), "max_grammar_size"]}


class _Vocabulary:
    """The tokenizer with the members that the library asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: GrammarTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]
        spellings = {self.tokens[token].decode("utf-8", "replace") for token in self.special_token_ids} - {""}
        self._special = re.compile(
            "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or "(?!)"
        )

    def __call__(self, text: str) -> list[int]:
        """The canonical tokens of the beginning of a text, in which nothing stands for a special token."""
        text = text[:TOKENIZED]
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text):  # cut after its first character, it is plain text
            ids += self._plain(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        """The tokenizer's own tokens if they spell the text, else the longest that fit, from left to right.

        Some tokenizers put a space before a text: then the tokens after a line break are taken.
        """
        spelled = text.encode()
        for before in ("", "\n"):
            ids = self._tokenizer.encode(before + text, add_special_tokens=False)
            for dropped in range(3):
                if b"".join(self.tokens[token] for token in ids[dropped:]) == spelled:
                    return ids[dropped:]
        return self._longest(spelled)

    def _longest(self, spelled: bytes) -> list[int]:
        ids: list[int] = []
        while spelled:
            fitting = (spelled[:end] for end in range(len(spelled), 0, -1))
            token = next((self._by_bytes[piece] for piece in fitting if piece in self._by_bytes), None)
            if token is None:
                break
            ids.append(token)
            spelled = spelled[len(self.tokens[token]) :]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        special = set(self.special_token_ids)
        return {
            spelled: token for token, spelled in enumerate(self.tokens) if spelled and token not in special
        }


def _in_one_line(message: str) -> str:
    """The library's message, short: its later lines draw the place in the source."""
    return " ".join(message.split())[:300]
