"""One contestant in a process of its own: `worker.py NAME OPTIONS`, then JSON lines in and out.

    -> {"prompt": [ids], "tokens": 129}
    <- {"first_seconds": ..., "rest_seconds": ..., "token_ids": [...], ...}

The interpreter that has llama_cpp need not have paceline, so this file is also run as a plain
script: it imports nothing but the standard library, and each contestant what it needs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any


class Paceline:
    """Our own engine, step by step."""

    def __init__(self, options: dict[str, Any]) -> None:
        import paceline

        self._llm = paceline.LLM(
            options["model"],
            threads=options["threads"],
            quantization=options["quantization"],
            enable_prefix_caching=False,  # every round computes its whole prompt
        )
        self._params = paceline.SamplingParams
        backend: Any = self._llm.engine.backend
        self.facts = {"version": paceline.__version__, "quantization": backend.quantization}

    def generate(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """`tokens` greedy tokens, and when they came."""
        engine = self._llm.engine
        params = self._params(temperature=0, max_tokens=tokens, ignore_eos=True)
        (request,) = engine.add_request(prompt, params)
        overhead = []
        start = time.perf_counter()
        while not request.num_output and not request.finished:
            engine.step()
        first = end = time.perf_counter()
        while not request.finished:
            before = end
            engine.step()
            end = time.perf_counter()
            overhead.append(end - before - engine.stats.forward_time)
        if request.error is not None:
            raise request.error
        return {
            "first_seconds": first - start,
            "rest_seconds": end - first,
            "token_ids": request.output_token_ids,
            "overhead_seconds": overhead,
        }


class LlamaCpp:
    """llama.cpp through llama-cpp-python, with its own greedy sampler."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp

        self._llama = llama_cpp.Llama(
            options["model"],
            n_ctx=options["context"],
            n_batch=512,
            n_threads=options["threads"],
            n_threads_batch=options["threads"],
            verbose=False,
        )
        self.facts = {
            "version": llama_cpp.__version__,
            "system_info": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def generate(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """`tokens` greedy tokens, and when they came."""
        self._llama.reset()  # or it would keep the prompt it has in common with the last round's
        start = time.perf_counter()
        stream = self._llama.generate(prompt, temp=0.0)
        token_ids = [next(stream)]
        first = time.perf_counter()
        token_ids += [next(stream) for _ in range(tokens - 1)]
        end = time.perf_counter()
        return {"first_seconds": first - start, "rest_seconds": end - first, "token_ids": token_ids}


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {"paceline": Paceline, "llama.cpp": LlamaCpp}


def peak_memory() -> int:
    """The most bytes this process ever had in memory."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # not first choice: on Linux it begins with what the parent had when it started this process
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    # libraries that print must not print into the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**values: Any) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        name, options = sys.argv[1:]
        contestant = CONTESTANTS[name](json.loads(options))
        answer(**contestant.facts)
        for line in sys.stdin:
            answer(**contestant.generate(**json.loads(line)), peak_memory_bytes=peak_memory())
    except Exception as error:
        traceback.print_exc()
        answer(error=str(error), kind=type(error).__name__)
        sys.exit(1)


if __name__ == "__main__":
    main()
