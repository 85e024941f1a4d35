"""A tiny llama for trying out draft heads: trained in minutes on a CPU, with prompts that it can answer.

    python examples/tiny_target.py tiny --steps 400
    paceline train dflash tiny --data tiny/train.jsonl --no-fc-norm --out head
    python -m benchmarks head tiny head --workload tiny/held_out.jsonl --limit 40

It learns little stories of a few patterns, byte by byte. The folder is one that every engine reads:
safetensors, config.json and a tokenizer. A prompt is the start of a story; none of held_out.jsonl is in
train.jsonl.
"""

import argparse
import json
import random
from pathlib import Path

import tokenizers
import torch
import transformers

from paceline.models.tokenizer import byte_alphabet

NAMES = "Ada Ben Cleo Dan Eve Finn Gus Hana Ivo June Kim Leo Mia Nils Ola Pia"
THINGS = "apples books coins drums eggs flags games hats inks jars kites lamps maps nuts"
PLACES = ["at the market", "in the garden", "by the river", "on the hill", "near the school"]
PATTERNS = (
    "{name} has {count} {thing}. {other} gives {name} {more} more. Now {name} has {total} {thing}. ",
    "{name} and {other} meet {place}. They find {count} {thing} and share them. ",
    "How many {thing} does {other} have? {other} had {total} {thing} and lost {more} of them {place}. ",
    "{other} looks for {thing} {place}, but {name} has sold all {count} of them. ",
)
END = "<|end|>"
BATCH, LENGTH = 8, 128  # stories' tokens of a training step: rows, and tokens of each
LEARNING_RATE, WARMUP = 3e-3, 30


def story(draw: random.Random) -> str:
    """A few sentences about the same names and things."""
    name, other = draw.sample(NAMES.split(), 2)
    count, more = draw.randint(2, 40), draw.randint(2, 20)
    words = {"name": name, "other": other, "thing": draw.choice(THINGS.split()), "place": draw.choice(PLACES)}
    words |= {"count": str(count), "more": str(more), "total": str(count + more)}
    return "".join(draw.choice(PATTERNS).format(**words) for _ in range(4))


def write_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """A token for each byte, and one that no text has."""
    letters = [*sorted(byte_alphabet()), END]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(letters)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END])
    made.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return made


def train(ids: torch.Tensor, steps: int, seed: int) -> transformers.LlamaForCausalLM:
    """The model, trained for `steps` steps on the text of these ids."""
    torch.manual_seed(seed)
    end = len(byte_alphabet())
    config = transformers.LlamaConfig(
        vocab_size=end + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=end,
    )
    model = transformers.LlamaForCausalLM(config).float()
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, betas=(0.9, 0.95))
    for step in range(steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARMUP) * max(0.05, 1 - step / steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(0, len(ids) - LENGTH, (BATCH,)).tolist()
        rows = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = model(rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the model and its prompts are written")
    parser.add_argument("--steps", type=int, default=400, help="training steps of 1,024 tokens")
    parser.add_argument("--prompts", type=int, default=400, help="prompts for training a head")
    parser.add_argument("--held-out", type=int, default=40, help="prompts for measuring it")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(given.seed)
    tokenizer = write_tokenizer(given.folder)
    text = "".join(story(draw) for _ in range(3000))
    train(torch.tensor(tokenizer.encode(text).ids), given.steps, given.seed).save_pretrained(given.folder)
    prompts: list[str] = []
    while len(prompts) < given.prompts + given.held_out:
        prompt = story(draw)[: draw.randint(20, 60)].rstrip()
        prompts += [prompt] if prompt not in prompts else []
    rows = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    (given.folder / "train.jsonl").write_text("".join(rows[: given.prompts]))
    (given.folder / "held_out.jsonl").write_text("".join(rows[given.prompts :]))


if __name__ == "__main__":
    main()
