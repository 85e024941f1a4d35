"""GrammarTrial: compile an untrusted grammar in a child process first.

The library cannot be interrupted, its fuel does not bound everything, and a stack overflow kills the process.
So a server has a child process compile the grammar and take a few steps in it; a child that takes too long or
too much memory is killed. The child's vocabulary is the 256 bytes: it starts quickly, and a grammar costs
there about what it costs with a model's vocabulary.

The child reads a line of JSON per grammar from standard input, and answers with one on standard output.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

STACK_BYTES = 64 << 20  # of a thread: the library follows rules and references by recursion
MEMORY_BYTES = 2 << 30  # address space of the child
STEPS = 32  # tokens of a random text to try
STEP_SECONDS = 0.25  # CPU time per token, at most: the whole batch waits for it
RULE = re.compile(r"^[ \t]*+[?!]?((?!start\b)[a-z_]\w*+)[^\n:\"/]*+:", re.MULTILINE)  # not terminals
START = re.compile(r"^[ \t]*+[?!]?start\b[^\n:\"/]*+:", re.MULTILINE)
END = 256  # the id that ends a text of bytes


class GrammarTrial:
    """Tries grammars, one at a time. The child starts on first use, and again after a grammar killed it."""

    def __init__(self, seconds: float) -> None:
        """`seconds` is the time limit for a grammar."""
        self._seconds = seconds
        self._child: subprocess.Popen[str] | None = None

    def fault_of(self, source: str, limits: Mapping[str, int]) -> str | None:
        """Why the grammar must not be compiled here; None if it is safe. `limits` are LLParserLimits."""
        child = self._started()
        ended, was_late = threading.Event(), threading.Event()

        def watch() -> None:
            if not ended.wait(self._seconds):
                was_late.set()
                child.kill()

        threading.Thread(target=watch, name="paceline-grammar-trial", daemon=True).start()
        try:
            answer = self._ask(child, [source, dict(limits), self._seconds])
        finally:
            ended.set()
        if answer is not None:
            return str(answer["fault"]) if answer["fault"] else None
        self.close()
        if was_late.is_set():
            return f"it takes longer than {self._seconds:g} s"
        return "it takes too much memory, or is too deep"

    def kill(self) -> None:
        """Kill the child. Any thread may call this."""
        if self._child is not None:
            self._child.kill()

    def close(self) -> None:
        """Kill the child and wait for its end."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.communicate()

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._child = subprocess.Popen(
                [sys.executable, "-P", __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must reach the server only
                text=True,
            )
            if self._ask(self._child, None) is None:  # it answers when it is ready
                self.close()
                raise RuntimeError("the process that tries out grammars has not started")
        return self._child

    @staticmethod
    def _ask(child: subprocess.Popen[str], question: object) -> dict[str, Any] | None:
        """The child's answer; None if it has died."""
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except OSError:
            return None
        answer: dict[str, Any] | None = json.loads(line) if line.endswith("\n") else None
        return answer


# --- the child ---


class _Bytes:
    """A vocabulary of bytes, with the interface that the library asks for."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = END
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


def main() -> None:
    """The child: answer until the input ends. Its CPU time is limited, so it does not outlive its parent."""
    from llguidance import LLTokenizer

    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY_BYTES)
    threading.stack_size(STACK_BYTES)
    vocabulary = LLTokenizer(_Bytes(), eos_token=[END])  # type: ignore[arg-type]
    for line in sys.stdin:
        question = json.loads(line)
        faults = [""]
        if question is not None:
            source, limits, seconds = question
            _limit(resource.RLIMIT_CPU, int(time.process_time() + seconds) + 2)
            faults = []
            thread = threading.Thread(target=_try, args=(vocabulary, source, limits, faults))
            thread.start()
            thread.join()
        print(json.dumps({"fault": faults[0]}), flush=True)  # IndexError if the thread raised: out of memory


def _try(vocabulary: LLTokenizer, source: str, limits: dict[str, Any], faults: list[str]) -> None:
    """Append the fault of a grammar to `faults`, or an empty text."""
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = LLParserLimits(**limits, verbose_errors=False)
    sources = [source] if source.startswith("{") else [source, _with_all_rules_at_once(source)]
    found = (_fault(LLMatcher(vocabulary, text, log_level=0, limits=parser_limits)) for text in sources)
    faults.append(next(filter(None, found), ""))


def _with_all_rules_at_once(lark: str) -> str:
    """The grammar with every rule as an alternative start, so that a costly rule shows in the first steps."""
    rules = dict.fromkeys(RULE.findall(lark))
    return START.sub(lambda head: head.group() + " ".join(f" {rule} |" for rule in rules), lark, count=1)


def _fault(matcher: LLMatcher) -> str:
    """The fault of a grammar in its first steps, or an empty text. Syntax errors are found at compilation."""
    any_byte = random.Random(0).randrange
    text = matcher.deep_copy()
    for _ in range(STEPS):
        began = time.thread_time()
        text.compute_ff_tokens()
        bits = text.compute_bitmask()
        if time.thread_time() - began > STEP_SECONDS:
            return f"one of its tokens takes longer than {STEP_SECONDS:g} s"
        first = any_byte(END)
        order = (*range(first, END), *range(first))
        token = next((token for token in order if bits[token >> 3] >> (token & 7) & 1), None)
        if text.is_error() or token is None or not text.consume_token(token):
            break
    return ""


def _limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


if __name__ == "__main__":
    main()
