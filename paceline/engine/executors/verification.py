"""Verification: from the outputs of a host pass to one verdict per part."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.arrays import Float32Array
from paceline.core.forward import ForwardOutput
from paceline.core.request import Request
from paceline.core.schedule import Scheduled
from paceline.core.trees import NO_TREE, DraftTrees, Draws
from paceline.core.verdict import NOTHING, Logprob, Verdict
from paceline.draft.speculative_config import MAX_NODES
from paceline.engine.executors.batch import prompt_rows
from paceline.errors import BackendError
from paceline.verify.logprobs import logprobs_of_fields, token_logprobs
from paceline.verify.sampling import Sampler, unusable_logits
from paceline.verify.verdict import Case, Rule

_CHAINS = [tuple(range(length)) for length in range(1 + MAX_NODES)]  # the nodes of chains, by length


class Verification:
    """Applies the engine's verification rule to every request's draft."""

    def __init__(self, rule: Rule, vocab_size: int) -> None:
        self._rule = rule
        self._sampler = Sampler(vocab_size)

    def verdicts(
        self, parts: Sequence[Scheduled], trees: DraftTrees | None, output: ForwardOutput
    ) -> list[Verdict]:
        """One verdict per part. Unusable logits (NaN) fail only their own request.

        A part's logits are those of requested prompt rows, of its root and of its nodes, in this order.
        """
        verdicts = [NOTHING] * len(parts)
        cases: dict[int, Case] = {}
        logits, chosen = output.logits, [] if output.chosen is None else output.chosen.tolist()
        first = first_chosen = 0
        for index, part in enumerate(parts):
            skipped, wanted = prompt_rows(part)
            try:
                if wanted and not part.request.finished:  # else it was aborted, or an earlier chunk failed
                    start = part.start + skipped
                    _take_prompt_logprobs(part.request, start, logits[first : first + wanted])
            except BackendError as error:
                verdicts[index] = Verdict((), (), error=error)
            first += wanted
            if not part.reaches_end:
                continue
            tree = NO_TREE if trees is None else trees.tree_lists(index)
            count = 1 + len(tree[0])
            draws = None if trees is None else trees.draws_of(index)
            if output.chosen is not None and not part.request.sampling_needs:
                tokens = chosen[first_chosen : first_chosen + count]
                if count == 1 and verdicts[index].error is None:  # no draft
                    verdicts[index] = chosen_verdict(tokens, part.request)
                    first_chosen += 1
                    continue
                case = _case(part.request, tree, draws, logits[:0], tokens)
                first_chosen += count
            else:
                case = _case(part.request, tree, draws, logits[first : first + count], None)
                first += count
            if verdicts[index].error is None:
                cases[index] = case
        decided = self._rule(list(cases.values()), self._sampler)
        for index, verdict in zip(cases, decided, strict=True):
            verdicts[index] = verdict
        return verdicts


def _case(
    request: Request,
    tree: tuple[Sequence[int], Sequence[int]],
    draws: Draws | None,
    logits: Float32Array,
    chosen: Sequence[int] | None,
) -> Case:
    return Case(
        logits,
        *tree,
        draws=draws,
        sampling=request.sampling,
        position=len(request.token_ids),
        num_output=request.num_output,
        is_last=request.ends_by,
        num_logprobs=request.params.logprobs,
        chosen=chosen,
    )


def _take_prompt_logprobs(request: Request, start: int, logits: Float32Array) -> None:
    """Store the log-probabilities of the prompt tokens after position `start`."""
    if not request.prompt_logprobs:
        request.prompt_logprobs.append(None)
    for row, line in enumerate(logits):
        token = request.prompt_token_ids[start + row + 1]
        request.prompt_logprobs.append(token_logprobs(line, token, request.params.prompt_logprobs or 0))


def chosen_verdict(tokens: Sequence[int], request: Request) -> Verdict:
    """The verdict for the next tokens of a request, sampled by a backend: a drafted chain and the bonus
    token.

    A token of -1 means that its logits were unusable.
    """
    if tokens[-1] < 0:
        position = len(request.token_ids) + len(tokens) - 1
        return Verdict((), (), error=unusable_logits(f"at position {position}"))
    return Verdict(_CHAINS[len(tokens) - 1], tuple(tokens))


def chosen_logprobs(
    verdict: Verdict, request: Request, fields: Sequence[Sequence[float]]
) -> tuple[dict[int, Logprob], ...]:
    """The log-probabilities of a verdict's tokens, from the fields that a backend computed for each row.

    `fields` [rows][fields of verify/logprobs.py]; rows after those of the tokens are not read.
    """
    count = request.params.logprobs or 0
    pairs = zip(fields, verdict.tokens, strict=False)
    return tuple([logprobs_of_fields(row, token, count) for row, token in pairs])
