"""`paceline chat`: a conversation in the terminal, or with messages from a pipe."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from paceline.core.params import SamplingParams
from paceline.errors import PacelineError
from paceline.home import paceline_home
from paceline.llm import LLM
from paceline.terminal.chat_stats import ChatStats
from paceline.terminal.flags import Options
from paceline.terminal.session import Interrupt, load, note, sampling_params, show, stream
from paceline.terminal.wrap import WordWrap

HISTORY_LINES = 1000
HELP = """\
/system TEXT  tell the model what it is; without TEXT, take that back
/undo         take back the last question and its answer
/reset        start over; the system text stays
/stats        speed, acceptance and drafters: of the last answer, and of all
/save FILE    write the conversation to FILE as JSON
/help         this
/exit         leave, as Ctrl-D does
Ctrl-C stops an answer; twice, it leaves. A line that ends with \\ continues in the next.
To begin a message with a slash, put a space before it."""


def chat(model: str, engine: Options, sampling: Options, system: str | None) -> None:
    """Chat until the user leaves or the pipe ends."""
    params = sampling_params(sampling)
    conversation = Conversation(load(model, engine), params, system)
    if sys.stdin.isatty():
        note(f"{model}: /help lists the commands, Ctrl-D leaves")
        with _line_editing():
            conversation.run(typed_messages())
    else:
        conversation.run(piped_messages())


class Conversation:
    """The messages so far, and the commands that change them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self.system = system
        self.messages: list[dict[str, str]] = []  # user and assistant alternate
        self._last, self._all = ChatStats(), ChatStats()  # of the last answer, and of all
        self._commands: dict[str, Callable[[str], None]] = {
            "/system": self._set_system,
            "/undo": self._undo,
            "/reset": self._reset,
            "/stats": self._show_stats,
            "/save": self._save,
            "/help": lambda _: note(HELP),
        }

    def run(self, lines: Iterator[str]) -> None:
        """Answer each line until they end or one is /exit."""
        for line in lines:
            if not line.strip():
                continue
            name, _, rest = line.partition(" ")
            if name == "/exit":
                return
            if not line.startswith("/"):
                self._answer(line.strip())
            elif name in self._commands:
                self._commands[name](rest.strip())
            else:
                note(f"there is no command {name}: /help lists them")

    def _all_messages(self) -> list[dict[str, str]]:
        first = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*first, *self.messages]

    def _answer(self, text: str) -> None:
        """Generate, show and store the answer. A message that fails is not stored."""
        self.messages.append({"role": "user", "content": text})
        try:
            answer = self._ask()
        except PacelineError as error:
            self.messages.pop()
            note(f"error: {error}")
            return
        if answer is None:
            self.messages.pop()
        else:
            self.messages.append({"role": "assistant", "content": answer})

    def _ask(self) -> str | None:
        """The model's answer to the messages so far; None if it failed."""
        tokenizer = self._llm.get_tokenizer()
        room = self._llm.engine.limits.max_model_len
        prompt = tokenizer.apply_chat_template(self._all_messages())
        token_ids = tokenizer.encode(prompt, add_special_tokens=False)
        if len(token_ids) >= room:
            note(
                f"the conversation would have {len(token_ids)} tokens and the context holds {room}, so this "
                "message was not sent. Make it shorter, take back earlier ones with /undo, or /reset."
            )
            return None
        with Interrupt() as interrupt, _wrapped() as write:
            request = stream(self._llm, token_ids, self._params, write, lambda: interrupt.asked)
        show("\n")
        self._last = ChatStats()
        for stats in (self._last, self._all):
            stats.end(request)
        if request.finish_reason == "abort":
            note("[stopped]")
        elif request.finish_reason == "length" and len(request.token_ids) >= room:
            note(f"[the context of {room} tokens is full: take back messages with /undo, or /reset]")
        elif request.finish_reason == "length":
            note(f"[stopped after {request.num_output} tokens: --max-tokens allows no more]")
        return request.detokenizer.text or None

    def _show_stats(self, _: str) -> None:
        note(
            "\n".join(["last answer:", *self._last.lines(), f"all {self._all.answers}:", *self._all.lines()])
        )

    def _set_system(self, text: str) -> None:
        self.system = text or None
        note("the system text is set" if text else "there is no system text now")

    def _undo(self, _: str) -> None:
        if not self.messages:
            note("there is nothing to take back")
            return
        del self.messages[-2:]
        note(f"taken back; questions before it: {len(self.messages) // 2}")

    def _reset(self, _: str) -> None:
        self.messages.clear()
        note("a new conversation")

    def _save(self, name: str) -> None:
        if not name:
            note("name the file: /save FILE")
            return
        path = Path(name).expanduser()
        try:
            path.write_text(json.dumps(self._all_messages(), indent=2, ensure_ascii=False) + "\n", "utf-8")
        except (OSError, ValueError) as error:
            note(f"error: {path} cannot be written: {error}")
        else:
            note(f"saved to {path}")


@contextmanager
def _wrapped() -> Iterator[Callable[[str], None]]:
    """What shows pieces of an answer; on a terminal, lines break between words."""
    if not sys.stdout.isatty():
        yield show
        return
    wrap = WordWrap(show, shutil.get_terminal_size().columns)
    try:
        yield wrap.feed
    finally:
        wrap.flush()


def typed_messages() -> Iterator[str]:
    """Messages typed by the user. Ctrl-C drops a line, Ctrl-D ends."""
    while True:
        try:
            message = input("> ")
            while message.endswith("\\"):
                message = message[:-1] + "\n" + input("… ")
        except KeyboardInterrupt:
            note("\n(Ctrl-D leaves)")
            continue
        except EOFError:
            note("")
            return
        yield message


def piped_messages() -> Iterator[str]:
    """The lines of standard input, one message each. Invalid UTF-8 is replaced."""
    for line in sys.stdin.buffer:
        yield line.decode(errors="replace").rstrip("\r\n")


@contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing and history at the prompt, if Python has readline. The history is saved."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = paceline_home() / "chat_history"
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)
