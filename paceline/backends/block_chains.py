"""How a parallel head drafts chains: the readable reference of every runner's `run_chains`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from paceline.backends.head_chains import coupled_choice, likeliest
from paceline.backends.heads import BlockGuesses, ChainNoise, HeadChains
from paceline.core.arrays import Int32Array
from paceline.core.forward import ForwardBatch
from paceline.models.heads.config import BlockConfig


def chains_by_guesses(
    guess: Callable[[Int32Array, Int32Array], BlockGuesses],
    blocks: ForwardBatch,
    block: BlockConfig,
    target_ids: Int32Array | None,
    most: Sequence[int],
    least_chance: float,
    noise: ChainNoise,
) -> HeadChains:
    """A chain of at most `most` tokens from each block that has run: the best token of slot after slot.

    A token is kept if the chance of the chain up to it is at least `least_chance`. That chance is the product
    of the head's confidences, or of its tokens' probabilities if it has no confidence head. `target_ids`
    [draft vocabulary] map the head's ids to the target's; None: the same ids.
    """
    count = blocks.num_requests
    tokens, chances = np.zeros((count, max(most)), np.int32), np.zeros((count, max(most)), np.float32)
    lengths = np.zeros(count, np.int32)
    for request in range(count):
        start = int(blocks.row_offsets[request])
        previous, chance = int(blocks.tokens[start]), 1.0
        for step in range(most[request]):
            slot = start + block.first_guess + step
            guessed = guess(np.array([slot], np.int32), np.array([previous], np.int32))
            logits = guessed.logits[0]
            if not np.isfinite(logits.max()):
                break
            if noise.temperatures[request] == 0.0:
                best, share = likeliest(logits)
            else:
                key = noise.seeds[request], np.uint64(blocks.context_lengths[request] + 1 + step)
                best, share = coupled_choice(logits, target_ids, noise.temperatures[request], key)
            chance *= share if guessed.confidences is None else float(guessed.confidences[0])
            if chance < least_chance:
                break
            previous = best if target_ids is None else int(target_ids[best])
            tokens[request, step], chances[request, step] = previous, chance
            lengths[request] = step + 1
    return HeadChains(tokens, chances, lengths)
