"""Answers to a great many prompts, for training a draft head: thousands at once on one GPU.

    python examples/sample_answers.py smollm2-135m --data prompts.jsonl --self-written 20000 --out data.jsonl
    paceline train eagle3 smollm2-135m --data data.jsonl --out my-head

For small models of the llama family. `paceline train answers` does the same for every model, and answers
with the bytes of the engine. A head need not learn from these very bytes, so what makes an answer depend on
its request alone is left out here: each of 4096 slots has its own row of a KV cache, and one pass, a CUDA
graph, feeds a token to every slot, prompts included. After 16 passes the host takes what has ended, and gives
those slots the next prompts. The file has the format of `paceline train answers`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from paceline.models.registry import load_checkpoint, load_tokenizer, resolve
from paceline.models.tokenizer import Tokenizer
from paceline.models.transformer.model import Transformer
from paceline.train.data.answers import seed_of
from paceline.train.data.examples import Example, ExampleWriter
from paceline.train.data.exclusion import Excluded
from paceline.train.data.prompts import Prompt, Skipped, read_all_prompts, tokenized
from paceline.train.data.self_prompts import OPENINGS, before_user_turn
from paceline.train.loop.sequences import load_target

PASSES = 16  # between two looks of the host
MAX_TURN = 192  # tokens of a turn that the model writes
REPORT_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """Tokens to continue."""

    name: str
    segment: str
    ids: Sequence[int]
    temperature: float
    max_tokens: int
    opening: str | None = None  # of a user's turn that the model writes; None: it answers


@triton.jit
def rotated(first, second, cosine, sine):  # type: ignore[no-untyped-def]
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def attend_kernel(  # type: ignore[no-untyped-def]
    qkv, keys, values, mixed, positions, done, frequencies, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, LENGTH: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate query and key, store key and value, and attend. Programs: [slots, KV_HEADS]."""
    slot, head = tl.program_id(0), tl.program_id(1)
    if tl.load(done + slot) != 0:
        return
    HALF: tl.constexpr = DIM // 2
    position = tl.load(positions + slot)
    half, whole, member = tl.arange(0, HALF), tl.arange(0, DIM), tl.arange(0, GROUP)
    angle = position.to(tl.float32) * tl.load(frequencies + half)
    cosine, sine = tl.cos(angle), tl.sin(angle)
    row = qkv + slot * (HEADS + 2 * KV_HEADS) * DIM
    share: tl.constexpr = HEADS // KV_HEADS
    exists = (member < share)[:, None]
    own = row + (head * share + member)[:, None] * DIM + half[None, :]
    query, query2 = rotated(
        tl.load(own, exists, 0.0).to(tl.float32), tl.load(own + HALF, exists, 0.0).to(tl.float32),
        cosine[None, :], sine[None, :],
    )  # fmt: skip
    at = row + (HEADS + head) * DIM + half
    key, key2 = rotated(tl.load(at).to(tl.float32), tl.load(at + HALF).to(tl.float32), cosine, sine)
    value = tl.load(row + (HEADS + KV_HEADS + head) * DIM + whole)
    base = (slot.to(tl.int64) * KV_HEADS + head) * LENGTH * DIM
    key, key2 = key.to(keys.dtype.element_ty), key2.to(keys.dtype.element_ty)
    tl.store(keys + base + position * DIM + half, key)
    tl.store(keys + base + position * DIM + HALF + half, key2)
    tl.store(values + base + position * DIM + whole, value)
    # the slot's own token first, then those before it
    own_score = query * key.to(tl.float32)[None, :] + query2 * key2.to(tl.float32)[None, :]
    highest = tl.sum(own_score, 1) * scale
    total = tl.full([GROUP], 1.0, tl.float32)
    sums = tl.zeros([GROUP, DIM], tl.float32) + value.to(tl.float32)[None, :]
    query, query2 = query.to(keys.dtype.element_ty), query2.to(keys.dtype.element_ty)
    for start in range(0, position, BLOCK):
        place = start + tl.arange(0, BLOCK)
        seen = place < position
        at_keys = keys + base + place[None, :] * DIM + half[:, None]
        scores = tl.dot(query, tl.load(at_keys, seen[None, :], 0.0))
        scores += tl.dot(query2, tl.load(at_keys + HALF, seen[None, :], 0.0))
        scores = tl.where(seen[None, :], scores * scale, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, shrink = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        block = tl.load(values + base + place[:, None] * DIM + whole[None, :], seen[:, None], 0.0)
        sums = sums * shrink[:, None] + tl.dot(weights.to(block.dtype), block)
        total, highest = total * shrink + tl.sum(weights, 1), higher
    out = mixed + (slot * HEADS + head * share + member)[:, None] * DIM + whole[None, :]
    tl.store(out, (sums / total[:, None]).to(mixed.dtype.element_ty), exists)


@triton.jit
def choose_kernel(  # type: ignore[no-untyped-def]
    logits, rows, positions, done, prompt_sizes, limits, temperatures, seeds, ends,
    VOCABULARY: tl.constexpr, LENGTH: tl.constexpr, ENDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The next token of a slot: of its prompt, or the largest of logit / temperature + Gumbel noise."""
    slot = tl.program_id(0)
    if tl.load(done + slot) != 0:
        return
    after = tl.load(positions + slot) + 1
    tl.store(positions + slot, after)
    if after < tl.load(prompt_sizes + slot):
        return
    temperature, seed = tl.load(temperatures + slot), tl.load(seeds + slot) + after * 7919
    highest, token = tl.full([], float("-inf"), tl.float32), tl.full([], 0, tl.int32)
    for start in range(0, VOCABULARY, BLOCK):
        place = start + tl.arange(0, BLOCK)
        scores = tl.load(logits + slot.to(tl.int64) * VOCABULARY + place, place < VOCABULARY, float("-inf"))
        if temperature > 0:
            uniform = tl.maximum(tl.rand(seed, place), 1e-20)
            scores = scores / temperature - tl.log(tl.maximum(-tl.log(uniform), 1e-20))
        best, where = tl.max(scores, 0, return_indices=True)
        if best > highest:
            highest, token = best, start + where
    tl.store(rows + slot * LENGTH + after, token)
    end = after + 1 >= tl.load(limits + slot)
    for each in tl.static_range(ENDS):
        end = end or token == tl.load(ends + each)
    tl.store(done + slot, end.to(tl.int32))


class Slots:
    """Rows of tokens that a model continues, all by one token in a pass."""

    def __init__(self, model: Transformer, slots: int, length: int, ends: Sequence[int]) -> None:
        config, device = model.config, model.device
        self.model, self.length, self.device = model, length, device
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.layers = [self._merged(layer) for layer in model.layers]
        (frequencies,) = model.frequencies.values()
        self.frequencies = frequencies.to(device)
        shape = config.num_layers, 2, slots, config.num_kv_heads, length, config.head_dim
        self.cache = torch.zeros(shape, dtype=model.dtype, device=device)

        def column(fill: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.full((slots,), fill, dtype=dtype, device=device)

        self.rows = torch.zeros(slots, length, dtype=torch.int32, device=device)
        self.positions, self.done = column(0, torch.int32), column(1, torch.int32)
        self.prompt_sizes, self.limits = column(1, torch.int32), column(1, torch.int32)
        self.temperatures, self.seeds = column(0, torch.float32), column(0, torch.int32)
        self.ends = torch.tensor(list(ends), dtype=torch.int32, device=device)
        self._run: Callable[[], None] = self.one_pass
        if device.type == "cuda":
            self.one_pass()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.one_pass()
            self._run = graph.replay

    def run(self) -> None:
        for _ in range(PASSES):
            self._run()

    def one_pass(self) -> None:
        """Feed each slot its token at its position, and write the next one behind it."""
        model, slots = self.model, len(self.rows)
        tokens = self.rows.gather(1, self.positions.long()[:, None])[:, 0]
        hidden = F.embedding(tokens, model.embedding)
        mixed = hidden.new_zeros(slots, self.heads * self.dim)
        for index, (norm, qkv, output, norm2, gate_up, down) in enumerate(self.layers):
            projected = F.linear(self._normed(hidden, norm), qkv)
            keys, values = self.cache[index]
            sizes = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "DIM": self.dim, "LENGTH": self.length}
            attend_kernel[(slots, self.kv_heads)](
                projected, keys, values, mixed, self.positions, self.done, self.frequencies, self.dim**-0.5,
                **sizes, GROUP=16, BLOCK=64, num_warps=2,
            )  # fmt: skip
            hidden = torch.addmm(hidden, mixed, output.T)
            gate, up = F.linear(self._normed(hidden, norm2), gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, F.silu(gate) * up, down.T)
        states = self._normed(hidden, model.norm.weight)
        if self.device.type == "cuda":
            logits = torch.mm(states, model.head.T, out_dtype=torch.float32)
        else:
            logits = torch.mm(states.float(), model.head.T.float())
        choose_kernel[(slots,)](
            logits, self.rows, self.positions, self.done, self.prompt_sizes, self.limits, self.temperatures,
            self.seeds, self.ends, VOCABULARY=logits.shape[1], LENGTH=self.length, ENDS=len(self.ends),
            BLOCK=4096, num_warps=8,
        )  # fmt: skip

    def free(self) -> torch.Tensor:
        """The slots whose job has ended, and those without one: int64."""
        return self.done.nonzero()[:, 0]

    def give(self, slots: torch.Tensor, jobs: Sequence[Job]) -> None:
        """Begin jobs in free slots."""
        sizes = [len(job.ids) for job in jobs]
        rows = torch.zeros(len(jobs), self.length, dtype=torch.int32)
        for row, job in zip(rows, jobs, strict=True):
            row[: len(job.ids)] = torch.tensor(job.ids, dtype=torch.int32)
        limits = [min(self.length, size + job.max_tokens) for size, job in zip(sizes, jobs, strict=True)]
        seeds = [seed_of(0, job.name) & 0x3FFFFFFF for job in jobs]
        for column, given in (
            (self.rows, rows),
            (self.prompt_sizes, torch.tensor(sizes, dtype=torch.int32)),
            (self.limits, torch.tensor(limits, dtype=torch.int32)),
            (self.temperatures, torch.tensor([job.temperature for job in jobs], dtype=torch.float32)),
            (self.seeds, torch.tensor(seeds, dtype=torch.int32)),
            (self.positions, torch.zeros(len(jobs), dtype=torch.int32)),
            (self.done, torch.zeros(len(jobs), dtype=torch.int32)),
        ):
            column[slots] = given.to(self.device)

    def _normed(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (hidden.shape[-1],), weight, self.model.norm.eps)

    @staticmethod
    def _merged(layer: object) -> tuple[torch.Tensor, ...]:
        attention, mlp = layer.attention, layer.feed_forward  # type: ignore[attr-defined]
        parts = [part.weight for part in (attention.query, attention.key, attention.value)]
        return (
            layer.attention_norm.weight,  # type: ignore[attr-defined]
            torch.cat(parts),
            attention.output.weight,
            layer.feed_forward_norm.weight,  # type: ignore[attr-defined]
            torch.cat([mlp.gate.weight, mlp.up.weight]),
            mlp.down.weight,
        )


def heats(temperatures: str) -> list[float]:
    return [float(part) for part in temperatures.split(",")]


class Source:
    """The jobs of a run: turns that the model writes, their answers, and the answers to given prompts."""

    def __init__(self, given: argparse.Namespace, tokenizer: Tokenizer, writer: ExampleWriter) -> None:
        self.tokenizer, self.writer, self.max_tokens = tokenizer, writer, given.max_tokens
        self.heats = heats(given.temperatures)
        self.skipped = Skipped()
        self._limits = tokenizer, given.max_prompt_tokens, self.skipped, Excluded(given.exclude)
        prompts = list(read_all_prompts(given.data, self.skipped))
        random.Random(0).shuffle(prompts)  # files are often sorted, and a run may be ended early
        self._prompts = enumerate(tokenized(iter(prompts), *self._limits))
        self._turns = iter(range(given.self_written))
        self._before = before_user_turn(tokenizer) if given.self_written else ""
        self._written: deque[Job] = deque()

    def next(self) -> Job | None:
        """A job; None if there is none now. Turns that end give more."""
        if self._written:
            return self._written.popleft()
        if (turn := next(self._turns, None)) is not None:
            opening = OPENINGS[turn % len(OPENINGS)]
            ids = self.tokenizer.encode(self._before + opening, add_special_tokens=False)
            return Job(f"self-{turn}", "self", ids, 1.0, MAX_TURN, opening)
        for number, (prompt, ids) in self._prompts:
            if f"{prompt.id}#0" not in self.writer.done:
                return self._answer(prompt, ids, number)
        return None

    def take(self, ended: Sequence[tuple[Job, list[int]]]) -> None:
        """Write the answers, and prepare answers to the turns."""
        self.writer.append(
            Example(job.name, job.segment, ids, len(job.ids)) for job, ids in ended if job.opening is None
        )
        for job, ids in ended:
            if job.opening is not None and ids[-1] in self.tokenizer.eos_ids:  # else it is no whole turn
                text = job.opening + self.tokenizer.decode(ids[len(job.ids) :])
                prompt = Prompt(job.name, job.segment, messages=[{"role": "user", "content": text}])
                for found, prompt_ids in tokenized(iter([prompt]), *self._limits):
                    number = int(job.name.split("-")[1]) // len(OPENINGS)
                    self._written.append(self._answer(found, prompt_ids, number))

    def _answer(self, prompt: Prompt, ids: list[int], number: int) -> Job:
        heat = self.heats[number % len(self.heats)]
        return Job(f"{prompt.id}#0", prompt.segment, ids, heat, self.max_tokens)


def sample(slots: Slots, source: Source) -> None:
    """Continue all jobs."""
    running: dict[int, Job] = {}
    ready: list[Job] = []
    began = reported = time.monotonic()
    tokens = finished = 0
    while True:
        free = slots.free()
        ended = [slot for slot in free.tolist() if slot in running]
        rows, sizes = slots.rows[ended].tolist(), (slots.positions[ended] + 1).tolist()
        taken = [(running.pop(slot), row[:size]) for slot, row, size in zip(ended, rows, sizes, strict=True)]
        while len(ready) < len(free) and (job := source.next()) is not None:
            ready.append(job)
        begun, ready = ready[: len(free)], ready[len(free) :]
        slots.give(free[: len(begun)], begun)
        running.update(zip(free.tolist(), begun, strict=False))
        if running:
            slots.run()  # nothing waits for it: the host works beside the GPU
        source.take(taken)
        tokens, finished = tokens + sum(sizes), finished + len(taken)
        while running and len(ready) < len(slots.rows) // 8 and (job := source.next()) is not None:
            ready.append(job)
        is_over = not (running or ready or taken)
        if (now := time.monotonic()) - reported > REPORT_SECONDS or is_over:
            reported = now
            print(
                f"{finished} ended, {tokens} tokens, {tokens / (now - began):.0f} a second", file=sys.stderr
            )
        if is_over:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", type=Path, action="append", default=[], help="prompts; may be repeated")
    parser.add_argument("--self-written", type=int, default=0, help="prompts that the model writes itself")
    parser.add_argument(
        "--temperatures", default="0", help="each prompt is answered at one of these, in turn"
    )
    parser.add_argument("--max-prompt-tokens", type=int, default=448)
    parser.add_argument("--max-tokens", type=int, default=320, help="of an answer")
    parser.add_argument("--exclude", type=Path, action="append", default=[], help="prompts never to train on")
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    path = resolve(given.model)
    checkpoint, tokenizer = load_checkpoint(path), load_tokenizer(path)
    settings = {
        "model": path.name,
        "sampler": Path(__file__).name,
        "temperatures": heats(given.temperatures),
        **{name: getattr(given, name) for name in ("max_prompt_tokens", "max_tokens", "self_written")},
    }
    writer = ExampleWriter(given.out, checkpoint.config.vocab_size, settings)
    source = Source(given, tokenizer, writer)
    device = torch.device(given.device)
    model = load_target(checkpoint, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    length = given.max_prompt_tokens + given.max_tokens
    with torch.no_grad():
        sample(Slots(model, given.slots, length, sorted(tokenizer.eos_ids)), source)
    writer.close()
    for line in source.skipped.lines():
        print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
