"""What generate and chat share: loading a model, streaming one answer, messages to the user."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from paceline.config import EngineConfig
from paceline.core.params import SamplingParams
from paceline.core.request import Request
from paceline.errors import RequestError
from paceline.llm import LLM
from paceline.models.registry import resolve
from paceline.terminal.flags import Options

# a model may write anything, but escape sequences must not reach the terminal
_CONTROL = {code: "\ufffd" for code in [*range(32), *range(127, 160)] if chr(code) not in "\n\t"}


def note(text: str) -> None:
    """Print something to the user that is not part of an answer."""
    print(text, file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print a piece of an answer at once; on a terminal without control characters."""
    print(text.translate(_CONTROL) if sys.stdout.isatty() else text, end="", flush=True)


def load(model: str, options: Options) -> LLM:
    """The loaded model, downloaded if necessary. Mistakes in options are reported first."""
    config = EngineConfig.from_options(model=model, **options)
    resolve(model)
    if config.backend.name == "cpu":
        announce_compilation()
    return LLM(model, **options)


def announce_compilation() -> None:
    """Tell the user that the first pass compiles kernels, if they are not cached yet."""
    from paceline.backends.cpu_kernels import cache_folder
    from paceline.kernel_cache import cached_kernels

    if not cached_kernels(cache_folder()):
        note("compiling kernels, once per machine: this takes one to two minutes")


def sampling_params(options: Options) -> SamplingParams:
    """The sampling parameters that the flags give."""
    text = options.get("logit_bias")
    if text is None:
        return SamplingParams(**options)
    try:
        bias = {int(token): value for token, value in json.loads(text).items()}
    except (ValueError, AttributeError, RecursionError):
        raise RequestError(
            f"--logit-bias must be a JSON object from token ids to numbers, such as '{{\"42\": -100}}', "
            f"got {text[:80]!r}."
        ) from None
    return SamplingParams(**{**options, "logit_bias": bias})


def stream(
    llm: LLM,
    token_ids: Sequence[int],
    params: SamplingParams,
    write: Callable[[str], None],
    stopped: Callable[[], bool] = lambda: False,
) -> Request:
    """The finished request. `write` receives its text in pieces; `stopped` returning True aborts it."""
    (request,) = llm.engine.add_request(token_ids, params)
    shown = 0
    try:
        while not request.finished and not stopped():
            llm.engine.step()
            write(request.detokenizer.text[shown:])
            shown = len(request.detokenizer.text)
    finally:
        llm.engine.abort(request.request_id)
    write(request.detokenizer.text[shown:])  # text that was held back as a possible start of a stop string
    if request.error is not None:
        raise request.error
    return request


class Interrupt:
    """Turns Ctrl-C into a flag that is read between two passes; an exception would interrupt one.

    The second Ctrl-C raises KeyboardInterrupt, for a pass that takes too long.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        self._before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _ask(self, _signal: int, _frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
