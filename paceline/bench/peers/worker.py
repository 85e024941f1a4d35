"""One contestant in its own process: `worker.py NAME OPTIONS`, then JSON lines in and out.

    -> {"prompt": [ids], "tokens": 129}
    <- {"first_seconds": ..., "rest_seconds": ..., "token_ids": [...], ...}

The interpreter of a peer need not have paceline, so this file is also run as a plain script: it imports
only the standard library, and each contestant imports what it needs.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any


class Paceline:
    """Our engine, step by step."""

    def __init__(self, options: dict[str, Any]) -> None:
        import paceline

        self._llm = paceline.LLM(
            options["model"],
            backend="cpu",
            threads=options["threads"],
            quantization=options["quantization"],
            enable_prefix_caching=False,  # every round computes its whole prompt
            speculative_config="off",
        )
        self._params = paceline.SamplingParams
        backend: Any = self._llm.engine.backend
        self.facts = {"version": paceline.__version__, "quantization": backend.quantization}

    def generate(self, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
        """Generate `tokens` tokens greedily, and time them."""
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
    """llama.cpp through llama-cpp-python, with its greedy sampler and prompt lookup."""

    def __init__(self, options: dict[str, Any]) -> None:
        import llama_cpp

        self._options = options
        self._llamas = {0: self._load(0)}  # by number of lookup tokens, fixed when it is created
        self.facts = {
            "version": llama_cpp.__version__,
            "system_info": llama_cpp.llama_print_system_info().decode().strip(" |"),
        }

    def _load(self, lookup: int) -> Any:
        import llama_cpp

        drafting: dict[str, Any] = {}
        if lookup:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            # without logits_all it cannot hold the logits of a prompt longer than n_batch
            drafting = {"draft_model": LlamaPromptLookupDecoding(num_pred_tokens=lookup), "logits_all": True}
        return llama_cpp.Llama(
            self._options["model"],
            n_ctx=self._options["context"],
            n_batch=512,
            n_threads=self._options["threads"],
            n_threads_batch=self._options["threads"],
            verbose=False,
            **drafting,
        )

    def generate(
        self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = (), lookup: int = 0
    ) -> dict[str, Any]:
        """Generate `tokens` tokens greedily, or up to one of `stop_ids`, and time them."""
        if lookup not in self._llamas:
            self._llamas[lookup] = self._load(lookup)
        llama = self._llamas[lookup]
        llama.reset()  # or it would reuse the prefix of the previous round
        start = time.perf_counter()
        stream = llama.generate(prompt, temp=0.0)
        token_ids = [next(stream)]
        first = time.perf_counter()
        while len(token_ids) < tokens and token_ids[-1] not in stop_ids:
            token_ids.append(next(stream))
        end = time.perf_counter()
        return {"first_seconds": first - start, "rest_seconds": end - first, "token_ids": token_ids}


class Transformers:
    """transformers in float32, with its prompt lookup."""

    def __init__(self, options: dict[str, Any]) -> None:
        import torch
        import transformers

        torch.set_num_threads(options["threads"])
        self._torch = torch
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        folder, where = options["model"], {}
        if folder.endswith(".gguf"):
            folder, where["gguf_file"] = os.path.split(folder)
        self._model = load(folder, dtype=torch.float32, **where).eval()
        self.facts = {"version": transformers.__version__}

    def generate(
        self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = (), lookup: int = 0
    ) -> dict[str, Any]:
        """Generate `tokens` tokens greedily, or up to one of `stop_ids`, and time them."""
        times: list[float] = []

        def note_time(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(time.perf_counter())
            return self._torch.zeros(len(ids), dtype=self._torch.bool)

        given = self._torch.tensor([list(prompt)])
        start = time.perf_counter()
        output = self._model.generate(
            given,
            attention_mask=self._torch.ones_like(given),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=list(stop_ids),
            pad_token_id=0,
            prompt_lookup_num_tokens=lookup or None,
            stopping_criteria=[note_time],
        )
        end = time.perf_counter()
        return {
            "first_seconds": times[0] - start,
            "rest_seconds": end - times[0],
            "token_ids": output[0, len(prompt) :].tolist(),
        }


class Vllm:
    """vLLM on the CPU, with its n-gram drafting or with the draft head of `options["head"]`."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # or its processes would outlive this one
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{options['threads'] - 1}"
        self._options = options
        if options["model"].endswith(".gguf"):
            raise ValueError("it reads folders of safetensors, and no .gguf file. Give such a folder.")
        self._llms: dict[int, Any] = {}  # by number of lookup tokens, fixed when it is created
        self.facts = {"version": vllm.__version__}

    def _load(self, lookup: int) -> Any:
        import vllm

        ngram = {"method": "ngram", "num_speculative_tokens": lookup, "prompt_lookup_max": 4}
        head = self._options.get("head")
        return vllm.LLM(
            self._options["model"],
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=self._options["context"],
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=False,
            kv_cache_memory_bytes=1 << 30,
            speculative_config=head or (ngram if lookup else None),
            enforce_eager=head is not None,  # with a head it is not timed
        )

    def generate(
        self, prompt: Sequence[int], tokens: int, stop_ids: Sequence[int] = (), lookup: int = 0
    ) -> dict[str, Any]:
        """Generate `tokens` tokens greedily, or up to one of `stop_ids`, and time them."""
        import vllm

        if lookup not in self._llms:
            self._llms[lookup] = self._load(lookup)
        llm = self._llms[lookup]
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, stop_token_ids=list(stop_ids))
        given = {"prompt_token_ids": list(prompt)}
        drafts_before, accepted_before = self._counts(llm)
        start = time.perf_counter()
        (output,) = llm.generate(given, params, use_tqdm=False)
        end = time.perf_counter()
        first = output.metrics.first_token_latency
        drafts, accepted = self._counts(llm)
        return {
            "first_seconds": first,
            "rest_seconds": end - start - first,
            "token_ids": list(output.outputs[0].token_ids),
            "drafts": drafts - drafts_before,
            "accepted": [
                count - first for count, first in zip_longest(accepted, accepted_before, fillvalue=0)
            ],
        }

    @staticmethod
    def _counts(llm: Any) -> tuple[int, list[int]]:
        """Since an engine's start: its drafts, and how many of them were accepted at each depth."""
        metrics = {metric.name: metric for metric in llm.get_metrics()}
        drafts = metrics.get("vllm:spec_decode_num_drafts")
        accepted = metrics.get("vllm:spec_decode_num_accepted_tokens_per_pos")
        return int(drafts.value) if drafts else 0, [
            int(count) for count in accepted.values
        ] if accepted else []


CONTESTANTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "paceline": Paceline,
    "llama.cpp": LlamaCpp,
    "transformers": Transformers,
    "vllm": Vllm,
}


def peak_memory() -> int:
    """Peak memory of this process in bytes."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # fallback: on Linux it starts with the parent's memory at the time of the fork
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    # libraries must not print into the answers
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
