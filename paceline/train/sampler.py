"""Sampler: many answers at once in torch, for a GPU, where thousands of sequences cost as much as one.

Unlike the engine it only samples: no pages, no streaming, no option but the temperature. Prompts are
padded on the left, so that all sequences of a batch write their next token to the same column.

    prompts   . . a b c | x y z       columns of the KV cache; '.' is masked padding
              d e f g h | u v w       positions count from the first real token
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from paceline.models.transformer import Transformer
from paceline.train.answers import Watch, patient
from paceline.train.sequences import run_layers

MAX_ROWS = 1024  # per batch; more are hardly faster
COMPACT_BELOW = 0.6  # if fewer of a batch's sequences still run, the finished rows are dropped


class Sampler:
    """An Answerer on any torch device."""

    def __init__(self, model: Transformer, eos_ids: Collection[int]) -> None:
        self.model = model
        self.device = model.embedding.device
        self.eos_ids = torch.tensor(sorted(eos_ids), device=self.device)
        self.generator = torch.Generator(self.device)

    def batch_size(self, width: int, max_tokens: int) -> int:
        """The number of prompts of `width` tokens to answer at once, by the device's free memory."""
        if self.device.type != "cuda":
            return MAX_ROWS
        config, element = self.model.config, self.model.embedding.element_size()
        columns = width + max_tokens
        cache_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * columns * element
        # attention of a prompt in one layer, in both precisions, and logits with their noise
        prefill_bytes = config.num_heads * width * width * (2 * element + 8) + 4 * 4 * config.vocab_size
        free, _ = torch.cuda.mem_get_info(self.device)
        return max(1, min(MAX_ROWS, int(0.7 * free) // (cache_bytes + prefill_bytes)))

    @torch.inference_mode()
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        seeds: Sequence[int],
        max_tokens: int,
        watch: Watch = patient,
    ) -> list[list[int] | None]:
        """One answer per prompt, including its end-of-sequence token, of at most `max_tokens` tokens.

        `watch` is told of the batch's beginning only: a batch is short on a GPU, and ends together.
        """
        watch(0, 0)
        self.generator.manual_seed(seeds[0])  # one noise stream for the whole batch
        width = max(len(prompt) for prompt in prompts)
        padding = torch.tensor([width - len(prompt) for prompt in prompts], device=self.device)
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        state = _Batch(self.model, tokens.to(self.device), padding, max_tokens)
        heat = torch.tensor(temperatures, device=self.device)
        running = torch.arange(len(prompts), device=self.device)  # prompt index of each row
        ended = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        answers = torch.full((len(prompts), max_tokens), -1, device=self.device)
        for step in range(max_tokens):
            chosen = self._choose(state.logits, heat)
            answers[running, step] = torch.where(ended, -1, chosen)
            ended |= torch.isin(chosen, self.eos_ids)
            if step % 16 == 15 or step < 2:  # not every step: reading from the device is slow
                alive = torch.nonzero(~ended).flatten()
                if not len(alive):
                    break
                if len(alive) < COMPACT_BELOW * len(ended):
                    state.keep(alive)
                    chosen, heat = chosen[alive], heat[alive]
                    running, ended = running[alive], ended[alive]
            if step + 1 < max_tokens:
                state.advance(chosen)
        return [[token for token in row if token >= 0] for row in answers.tolist()]

    def _choose(self, logits: torch.Tensor, heat: torch.Tensor) -> torch.Tensor:
        """One token per row [rows]: the best at temperature 0, otherwise sampled by Gumbel-max."""
        noise = torch.empty_like(logits).exponential_(generator=self.generator).clamp_(min=1e-30)
        return torch.addcmul(logits, noise.log_(), heat[:, None], value=-1).argmax(-1)


class _Batch:
    """Sequences that grow together, with their KV cache."""

    def __init__(
        self, model: Transformer, tokens: torch.Tensor, padding: torch.Tensor, max_tokens: int
    ) -> None:
        """Prefill tokens [rows, width], of which the first `padding` [rows] columns are padding."""
        config, device, dtype = model.config, model.embedding.device, model.embedding.dtype
        rows, width = tokens.shape
        self.model = model
        self.padding = padding
        self.columns = 0  # columns filled so far
        self.attend_one = _attention_of_one(device, config.head_dim)
        # float [layers, rows, kv_heads, columns, head_dim]
        shape = (config.num_layers, rows, config.num_kv_heads, width + max_tokens, config.head_dim)
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.logits = self._run(tokens)  # float32 [rows, vocab] of each sequence's last token

    def advance(self, tokens: torch.Tensor) -> None:
        """Append one token [rows] to each sequence."""
        self.logits = self._run(tokens[:, None])

    def keep(self, rows: torch.Tensor) -> None:
        """Continue with these rows only."""
        self.padding = self.padding[rows]
        self.keys, self.values = self.keys[:, rows], self.values[:, rows]

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        start, stop = self.columns, self.columns + tokens.shape[1]
        column = torch.arange(stop, device=tokens.device)
        positions = (column[start:] - self.padding[:, None]).clamp(min=0)  # [rows, new]

        def attend(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            keys, values = self.keys[layer], self.values[layer]
            keys[:, :, start:stop] = key.transpose(1, 2)
            values[:, :, start:stop] = value.transpose(1, 2)
            attend_new = self.attend_one if stop - start == 1 else attend_many
            return attend_new(query, keys, values, self.padding, stop, self.model.config.window(layer))

        hidden, _ = run_layers(self.model, tokens, positions, attend)
        self.columns = stop
        return self.model.logits(hidden[:, -1]).float()


# Attention of queries [rows, new, heads, head_dim] of the newest columns, over keys and values [rows,
# kv_heads, columns, head_dim], given the first visible column of each row [rows], the end column and the
# window. The result has the shape of the queries.
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int, int | None], torch.Tensor]


def _attention_of_one(device: torch.device, head_dim: int) -> Attention:
    """The attention for one new token per row: on a GPU a kernel, since it takes most of the time."""
    if device.type != "cuda" or head_dim & (head_dim - 1):
        return attend_many
    from paceline.train.decode_attention import attend_one

    return attend_one


def attend_many(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: torch.Tensor,
    stop: int,
    window: int | None,
) -> torch.Tensor:
    """Attention in plain torch. Query heads of one KV head are rows of one product, so that keys are read
    once."""
    rows, new, heads, head_dim = query.shape
    keys, values = keys[:, :, :stop], values[:, :, :stop]
    kv_heads = keys.shape[1]
    column = torch.arange(stop, device=query.device)
    distance = column[stop - new :, None] - column  # [new, columns]
    seen = (distance >= 0) & (column >= first[:, None, None])  # [rows, new, columns]
    if window is not None:
        seen = seen & (distance < window)
    # [rows, kv, group, new, dim]
    grouped = query.view(rows, new, kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    flat = grouped.reshape(rows, kv_heads, -1, head_dim)  # [rows, kv_heads, group * new, head_dim]
    scores = (flat @ keys.transpose(-1, -2) * head_dim**-0.5).view(rows, kv_heads, -1, new, stop)
    # the lowest finite number: a row of padding sees no key, and must not become NaN
    scores = scores.masked_fill(~seen[:, None, None], torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(values.dtype)
    mixed: torch.Tensor = weights.view(rows, kv_heads, -1, stop) @ values
    grouped = mixed.view(rows, kv_heads, -1, new, head_dim).permute(0, 3, 1, 2, 4)
    return grouped.reshape(rows, new, heads, head_dim)
