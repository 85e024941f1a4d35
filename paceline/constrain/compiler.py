"""GrammarCompiler: from StructuredOutputsParams to compiled grammars, cached and with a time limit."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from paceline.constrain.constraint import Constraint, Endings
from paceline.constrain.limits import GrammarLimits
from paceline.constrain.sources import grammar_source
from paceline.constrain.trial import STACK_BYTES, GrammarTrial
from paceline.core.detokenizer import TextTokenizer
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.errors import GrammarError, RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CACHED_GRAMMARS = 128  # at most
CACHED_BYTES = 1 << 20  # of their sources, at most
TOKENIZED = 2048  # characters of a forced text per call: a schema may force an endless text

# what errors call it, by its kind: clients that send a schema do not know of grammars
NAMES = {"json": "the JSON schema", "regex": "the regular expression"}


class Grammar:
    """A compiled grammar. Any number of outputs can start from it."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    def start(self, ignore_eos: bool = False) -> Constraint:
        """A constraint at the start of an output. `ignore_eos`: end only where nothing else may follow."""
        endings = Endings(self._eos_ids, eager=not ignore_eos)
        return Constraint(self._matcher.deep_copy(), self._vocab_size, endings)

    @property
    def usable(self) -> bool:
        """Whether an output can start: false once requests have used up the grammar's lexer states."""
        first = self.start()
        try:
            return bool(first.forced()) or bool(first.packed_mask().any())
        except GrammarError:
            return False


class GrammarCompiler:
    """Compiles grammars, one at a time. Any thread may call it."""

    def __init__(
        self, tokenizer: TextTokenizer, vocab_size: int, limits: GrammarLimits | None = None
    ) -> None:
        """`vocab_size` is the model's; ids that the tokenizer lacks are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._limits = limits or GrammarLimits()
        self._compiling = threading.Lock()
        self._changing = threading.Lock()  # for the cache
        self._cache: OrderedDict[str, Grammar] = OrderedDict()  # by source, least recently used first
        self._trial = GrammarTrial(self._limits.seconds)

    def compile(
        self, params: StructuredOutputsParams, *, trusted: bool = True, lenient: bool = False
    ) -> Grammar:
        """The compiled grammar. RequestError if it is not valid or exceeds the limits.

        A grammar that is not `trusted` is first tried in a child process that can be killed. A `lenient` one
        leaves out the keywords of JSON schemas that cannot be followed, which otherwise are an error.
        """
        try:
            source = grammar_source(params, self._limits, lenient)
            found = self._cached(source)
            if found is not None:
                return found
            with self._compiling:
                found = self._cached(source)
                if found is None:
                    vocabulary = self._vocabulary
                    name = NAMES.get(params.kind, "the grammar")
                    if not trusted:
                        self._try(source, name)
                    seconds = self._limits.seconds if trusted else None
                    found = self._compiled(source, name, vocabulary, seconds)
                self._keep(source, found)
        except ImportError as error:
            raise RequestError(
                "structured_outputs needs the package llguidance: pip install 'paceline[serve]'."
            ) from error
        return found

    def prepare(self) -> None:
        """Warm up: build the token table now. The library holds the GIL while it does."""
        with suppress(ImportError, RequestError):  # raised again by the first request that needs a grammar
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
        """Stop the child process that tries grammars."""
        self._trial.kill()
        with self._compiling:
            self._trial.close()

    def _try(self, source: str, name: str) -> None:
        fault = self._trial.fault_of(source, self._library_limits)
        if fault is not None:
            raise RequestError(f"{name} cannot be compiled: {fault}. Use a simpler one.")

    def _compiled(self, source: str, name: str, vocabulary: LLTokenizer, seconds: float | None) -> Grammar:
        """The grammar, compiled on a thread with a deep stack; RequestError if that takes too long.

        The library releases the GIL meanwhile. It cannot be interrupted.
        """
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(verbose_errors=False, **self._library_limits)
        matchers: list[LLMatcher] = []

        def work() -> None:
            matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
            matcher.deep_copy().compute_ff_tokens()  # the first step is often the slowest: count it too
            matchers.append(matcher)

        old_size = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=work, name="paceline-grammar", daemon=True)
            thread.start()
        finally:
            threading.stack_size(old_size)
        thread.join(seconds)
        if not matchers:
            raise RequestError(f"{name} takes longer than {seconds:g} s to compile. Use a simpler one.")
        if matchers[0].is_error():
            raise RequestError(f"{name} cannot be compiled: {_explained(matchers[0].get_error())}")
        grammar = Grammar(matchers[0], self._vocab_size, sorted(self._tokenizer.eos_ids))
        if not grammar.usable:
            raise RequestError(f"{name} allows no text at all, or its first token costs too much.")
        return grammar

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        """The token table in the library's form."""
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
    """The tokenizer with the interface that the library asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: TextTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = min(tokenizer.eos_ids)
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = [token for token in range(vocab_size) if tokenizer.is_special(token)]
        spellings = {self.tokens[token].decode("utf-8", "replace") for token in self.special_token_ids} - {""}
        self._special = re.compile(
            "|".join(map(re.escape, sorted(spellings, key=len, reverse=True))) or "(?!)"
        )

    def __call__(self, text: str) -> list[int]:
        """The canonical tokens of the first TOKENIZED characters of a text, none of them special."""
        text = text[:TOKENIZED]
        ids: list[int] = []
        start = 0
        for match in self._special.finditer(text):  # split after its first character: then it is plain text
            ids += self._plain(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._plain(text[start:])

    def _plain(self, text: str) -> list[int]:
        """The tokenizer's tokens if they spell the text, else greedily the longest, from left to right.

        Some tokenizers add a space before a text: then the tokens after a line break are used.
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


def _explained(message: str) -> str:
    """The library's message in one line of at most 300 characters, without the source position that it draws
    below, and what to do about it."""
    line = " ".join(message.split())[:300]
    if found := re.fullmatch(r"Unimplemented keys: \[(.*)\]", line):
        return f"the JSON schema has {found[1]}, which is not supported. Leave it out of the schema."
    return f"{line.rstrip('.')}. Correct it, or leave it out."
