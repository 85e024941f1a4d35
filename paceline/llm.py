"""LLM: the offline API, with vLLM's names and types, so that users only change the import."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.engine.engine import Engine
from paceline.engine.outputs import RequestOutput, request_output
from paceline.errors import ConfigError, RequestError
from paceline.models.chat import TemplateOptions
from paceline.options import unknown_option

if TYPE_CHECKING:
    from paceline.models.tokenizer import Tokenizer

# a text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}
Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Message: TypeAlias = Mapping[str, Any]


def python_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration of an LLM or AsyncLLM. ConfigError for options that only a server can use."""
    config = EngineConfig.from_options(model=model, **options)
    if config.model.lora_modules:
        raise ConfigError(
            "lora_modules is for servers, whose requests name an adapter; prompts of the Python API cannot. "
            "Use `paceline serve --lora-modules NAME=FOLDER`, or merge the adapter into the model."
        )
    return config


class EngineOwner:
    """What an LLM holds: an engine, closed with it, and its tokenizer."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self._tokenizer = tokenizer
        self._close = weakref.finalize(self, engine.close)  # also at interpreter exit


class LLM(EngineOwner):
    """A loaded model that generates text.

    Options: tokenizer, max_model_len, backend, dtype, quantization, device, threads, tensor_parallel_size,
    exact, kv_cache_memory_bytes, gpu_memory_utilization, enable_prefix_caching, max_num_seqs,
    max_num_batched_tokens, speculative_config, share_suffix_cache, seed. paceline/config.py describes each;
    unknown ones raise ConfigError.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **options: Any) -> None:
        from paceline.build import build_engine

        loaded = build_engine(python_config(model, options))
        loaded.engine.prepare()
        super().__init__(loaded.engine, loaded.tokenizer)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer) -> LLM:
        """An LLM around an existing engine."""
        llm = cls.__new__(cls)
        EngineOwner.__init__(llm, engine, tokenizer)
        return llm

    def close(self) -> None:
        """Save what persists, such as a suffix cache. The LLM cannot be used afterwards."""
        self._close()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput per prompt, in order.

        `prompts` is one prompt or a list; `sampling_params` is one for all or a list with one for each.
        If any of them is invalid, nothing runs. A request that fails while it runs has finish_reason
        "error" and does not affect the others. `use_tqdm` shows a progress bar on a terminal.
        """
        texts_and_ids = [tokenized(prompt, self._tokenizer) for prompt in _as_prompts(prompts)]
        return self._run(texts_and_ids, _as_params(sampling_params, len(texts_and_ids)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One RequestOutput per conversation. `messages` is one list of messages or a list of such lists.

        With `continue_final_message` the output continues the last message. `chat_template_kwargs`
        are variables of the model's chat template, such as Qwen3's `enable_thinking`.
        """
        options: TemplateOptions = {"add_generation_prompt": add_generation_prompt}
        if continue_final_message:
            options["continue_final_message"] = True
        if chat_template_kwargs:
            options["chat_template_kwargs"] = chat_template_kwargs
        texts_and_ids = [
            tokenized_chat(conversation, self._tokenizer, tools, options)
            for conversation in _as_conversations(messages)
        ]
        return self._run(texts_and_ids, _as_params(sampling_params, len(texts_and_ids)), use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The text of one output, in pieces. Closing the iterator early aborts the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"stream gives one output, but n is {params.n}. Use generate, or n=1.")
        _, ids = tokenized(prompt, self._tokenizer)
        (request,) = self._add(ids, params)
        sent = 0
        try:
            while not request.finished or sent < len(request.detokenizer.text):
                if not request.finished:
                    self.engine.step()
                # all new text, not the step's delta: other calls may have stepped the engine in between
                text = request.detokenizer.text[sent:]
                if text:
                    sent += len(text)
                    yield text
            if request.error is not None:
                raise request.error
        finally:
            self.engine.abort(request.request_id)

    def _run(
        self,
        texts_and_ids: Sequence[tuple[str | None, Sequence[int]]],
        params: Sequence[SamplingParams],
        show_progress: bool,
    ) -> list[RequestOutput]:
        """Add all requests, step until they have finished, and return their outputs in order."""
        groups: list[list[Request]] = []
        try:
            for (_, ids), request_params in zip(texts_and_ids, params, strict=True):
                groups.append(self._add(ids, request_params))
            self._step_until_done(groups, show_progress)
        finally:  # after an invalid request or an interruption: remove what was added
            for children in groups:
                self.engine.abort(children[0].request_id)
        return [
            request_output(text, children, self._tokenizer)
            for (text, _), children in zip(texts_and_ids, groups, strict=True)
        ]

    def _add(self, ids: Sequence[int], params: SamplingParams) -> list[Request]:
        """The queued requests. Warns if they ask for a drafter that is not loaded."""
        children = self.engine.add_request(ids, params)
        if (name := children[0].unavailable_drafter) is not None:
            warnings.warn(
                f"speculative asks for {name!r}, which is not loaded; the engine drafts as by default. Name "
                "it in speculative_config, or give 'strict': True to get an error instead.",
                stacklevel=2,
            )
        return children

    def _step_until_done(self, groups: Sequence[Sequence[Request]], show_progress: bool) -> None:
        unfinished = {id(request) for children in groups for request in children}
        with _progress(len(unfinished), show_progress) as advance:
            while unfinished:
                for delta in self.engine.step():
                    if delta.request.finished and id(delta.request) in unfinished:
                        unfinished.remove(id(delta.request))
                        advance()


@contextmanager
def _progress(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    """A progress bar, shown on a terminal for more than one request; call it for each that has finished."""
    if not wanted or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("Generating", total=total)
        yield lambda: bar.advance(task)


def tokenized(prompt: Prompt, tokenizer: Tokenizer) -> tuple[str | None, Sequence[int]]:
    """A prompt's text (None if it was given as ids) and its token ids."""
    given = _as_mapping(prompt)
    if "prompt_token_ids" in given:
        return given.get("prompt"), given["prompt_token_ids"]
    text = given.get("prompt")
    if not isinstance(text, str) or not text:
        raise RequestError(f"the prompt must be a text that is not empty, or token ids; got {text!r}.")
    return text, tokenizer.encode(text)


def tokenized_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, object]] | None,
    options: TemplateOptions,
) -> tuple[str, Sequence[int]]:
    """The text that the chat template makes of a conversation, and its token ids."""
    text = tokenizer.apply_chat_template(messages, tools=tools, **options)
    return text, tokenizer.encode(text, add_special_tokens=False)


def _as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError(
            f"a prompt must be a text, a list of token ids, or a list of those, got {type(prompts).__name__}."
        )
    if not prompts:
        raise RequestError("there are no prompts: give at least one.")
    return [prompts] if hasattr(prompts[0], "__index__") else list(prompts)


def _as_mapping(prompt: Prompt) -> Mapping[str, Any]:
    """A prompt in its mapping form."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not isinstance(prompt, Mapping):
        return {"prompt_token_ids": prompt}
    for name in prompt:
        if name not in ("prompt", "prompt_token_ids"):
            raise RequestError(unknown_option(str(name), ("prompt", "prompt_token_ids"), "a prompt"))
    return prompt


def _as_conversations(messages: Any) -> list[Sequence[Message]]:
    """A list of conversations, from one or several."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            "messages must be a non-empty list of {'role': ..., 'content': ...}, or a list of those."
        )
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def _as_params(params: Any, count: int) -> list[SamplingParams]:
    """One SamplingParams for each of `count` prompts."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(item, SamplingParams) for item in params):
        raise RequestError(
            f"sampling_params must be a SamplingParams or a list of them, got {type(params).__name__}."
        )
    if len(params) != count:
        raise RequestError(f"there are {count} prompts but {len(params)} sampling_params: give one for each.")
    return list(params)
