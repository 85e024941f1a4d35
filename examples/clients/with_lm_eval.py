"""lm-eval: the evaluation harness, as `local-completions` with the server's own tokenizer."""

from __future__ import annotations

import math
from typing import Any

from asked import MAX_TOKENS, Target, check_text
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

PROMPT = "The capital of France is"


def model(target: Target) -> Any:
    """The harness's model, which asks the server for its tokens."""
    return LocalCompletionsAPI(
        base_url=f"{target.url}/completions",
        model=target.model,
        tokenizer_backend="remote",
        tokenized_requests=False,
        auth_token=target.api_key,
        batch_size=2,
    )


def plain(target: Target) -> str:
    """`generate_until`: the text up to a stop string."""
    asked = (PROMPT, {"until": ["."], "max_gen_toks": MAX_TOKENS, "temperature": 0})
    (text,) = model(target).generate_until([Instance("generate_until", {}, asked, 0)], disable_tqdm=True)
    return check_text(text)


def scores(target: Target) -> str:
    """`loglikelihood`: a true sentence is likelier than a false one, and greedy decoding gives it."""
    pairs = [(PROMPT, " Paris"), (PROMPT, " carrots")]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
    (true, is_greedy), (false, _) = model(target).loglikelihood(requests, disable_tqdm=True)
    assert math.isfinite(true)
    assert true > false, f"{true} is not more than {false}"
    assert is_greedy, "greedy decoding gives something else"
    return f"{true:.3f} and {false:.3f}"
