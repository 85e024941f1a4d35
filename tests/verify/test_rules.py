"""The compiled rules decide what the readable ones decide, and treat every case of a batch by itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.params import SamplingParams
from paceline.core.sampling import SamplingState
from paceline.core.trees import Draws
from paceline.core.verdict import Verdict
from paceline.errors import BackendError
from paceline.verify.draws import draw, uniform
from paceline.verify.logprobs import token_logprobs
from paceline.verify.noise import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL
from paceline.verify.pathwise import verify_pathwise
from paceline.verify.rules import RULES
from paceline.verify.sampling import Sampler
from paceline.verify.verdict import Case
from tests.verify import reference_rules
from tests.verify.reference import draw_reference
from tests.verify.reference_rules import Drafted

VOCAB = 13  # no multiple of anything
ENDING = 3
CLASSIC = {
    "rejection": reference_rules.rejection,
    "block": reference_rules.block,
    "traversal": reference_rules.traversal,
}
OPTIONS = [
    {},
    {"temperature": 0.7, "top_k": 4},
    {"top_p": 0.6, "min_p": 0.05},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"logit_bias": {2: 3.0, 5: -100.0}, "min_tokens": 6},
    {"allowed_token_ids": range(1, 10)},
]
BAD_WORDS = [[1], [7, 2], [4, 5, 6], *([token, token] for token in range(VOCAB))]


def make_case(seed, options, num_nodes, chain=False, drawn=0.6, nan_node=None, **fields):
    """A random draft, drawn and chosen nodes mixed, made as a drafter would make it."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=(1 + num_nodes, VOCAB)) * 2).astype(np.float32)
    if nan_node is not None:
        logits[nan_node + 1, rng.integers(VOCAB)] = np.nan
    bad_words = BAD_WORDS if "allowed_token_ids" in options else ()
    state = SamplingState(SamplingParams(**options), seed, [1, 2], [ENDING], bad_words=bad_words)
    for token in (4, 4, 7):
        state.advance(token)
    position = 5
    draft_probs = rng.dirichlet(np.full(VOCAB, 0.5), size=num_nodes) + 1e-9
    tokens, parents, rows = [], [], []
    for node in range(num_nodes):
        parent = node - 1 if chain else int(rng.integers(-1, node))
        siblings = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        if rng.random() < drawn:
            token = draw(draft_probs[node], seed, position, STREAM_DRAFT, node, siblings)
            rows.append(node)
        else:
            token = int(rng.choice([token for token in range(VOCAB) if token not in siblings]))
            rows.append(-1)
        tokens.append(token)
        parents.append(parent)
    case = Case(
        logits,
        tokens,
        parents,
        draws=Draws(draft_probs, np.array(rows, dtype=np.int32)),
        sampling=state,
        position=position,
        num_output=3,
        is_last=lambda token, num_output: token == ENDING or num_output + 1 >= 8,
        num_logprobs=2,
    )
    return replace(case, **fields)


@pytest.mark.parametrize(("min_tokens", "last"), [(4, ENDING), (5, 6)])
def test_min_tokens_counts_the_tokens_of_the_draft(min_tokens: int, last: int) -> None:
    """Three tokens are there: the drafted one is the fourth, so the one after it may end the output."""
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, 5], logits[1, ENDING], logits[1, 6] = 3.0, 3.0, 2.0
    params = SamplingParams(temperature=0.0, min_tokens=min_tokens)
    case = Case(
        logits,
        [5],
        [-1],
        draws=None,
        sampling=SamplingState(params, 0, [1, 2], [ENDING]),
        position=5,
        num_output=3,
        is_last=lambda token, num_output: token == ENDING,
        num_logprobs=None,
    )
    (verdict,) = verify_pathwise([case], Sampler(VOCAB))
    assert verdict.tokens == (5, last)


def judged(case: Case, rule: reference_rules.ReferenceRule) -> Verdict:
    """What a readable rule makes of a case, with the uniforms of the case's step."""
    sampler = Sampler(VOCAB)
    reached = {-1: ()}  # the path to every node that can be reached, and may be followed
    cut, dead = [], {}
    target_probs = [sampler.probabilities(case.sampling, case.logits[0], case.num_output)]
    for node, token in enumerate(case.tokens):
        if case.parents[node] not in reached:
            continue
        cut.append(node)
        path = (*reached[case.parents[node]], token)
        probs = np.full(VOCAB, np.nan)  # must not be looked at
        if not case.is_last(token, case.num_output + len(path) - 1):
            try:
                branch = case.sampling.branch(path)
                probs = sampler.probabilities(branch, case.logits[node + 1], case.num_output + len(path))
                reached[node] = path
            except BackendError as error:
                dead[len(cut) - 1] = error
        target_probs.append(probs)
    places = {node: place for place, node in enumerate(cut)} | {-1: -1}
    draft = Drafted(
        np.array(target_probs),
        [case.tokens[node] for node in cut],
        [places[case.parents[node]] for node in cut],
        case.draws.draft_probs,
        [case.draws.rows[node] for node in cut],
    )

    def accept(place, chance):
        return uniform(case.sampling.seed, case.position, STREAM_ACCEPT, cut[place]) < chance

    end, law = rule(draft, accept)
    if end in dead:
        return Verdict((), (), error=dead[end])
    last = draw_reference(law, (), uniform(case.sampling.seed, case.position, STREAM_RESIDUAL, 0))
    accepted = []
    while end >= 0:
        accepted.insert(0, cut[end])
        end = draft.parents[end]
    tokens = [case.tokens[node] for node in accepted]
    if not tokens or not case.is_last(tokens[-1], case.num_output + len(tokens) - 1):
        tokens.append(last)
    rows = zip([-1, *accepted], tokens, strict=False)
    try:
        logprobs = tuple(token_logprobs(case.logits[node + 1], token, 2) for node, token in rows)
    except BackendError as error:  # an option had put a number in the place of a NaN
        return Verdict((), (), error=error)
    return Verdict(tuple(accepted), tuple(tokens), logprobs)


def same(verdict: Verdict, expected: Verdict) -> bool:
    return (
        verdict.accepted == expected.accepted
        and verdict.tokens == expected.tokens
        and verdict.logprobs == expected.logprobs
        and str(verdict.error) == str(expected.error)
    )


@pytest.mark.parametrize("name", CLASSIC)
@given(
    seed=st.integers(0, 2**32 - 1),
    options=st.sampled_from(OPTIONS),
    num_nodes=st.integers(1, 9),
    drawn=st.sampled_from([0.0, 0.6, 1.0]),
    nan_node=st.one_of(st.none(), st.integers(0, 8)),
)
@example(
    seed=606890749,
    options={"logit_bias": {2: 3.0, 5: -100.0}, "min_tokens": 6},
    num_nodes=4,
    drawn=1.0,
    nan_node=0,
)
@settings(max_examples=150)
def test_compiled_rules_decide_as_the_readable_ones(name, seed, options, num_nodes, drawn, nan_node):
    nan_node = nan_node if nan_node is not None and nan_node < num_nodes else None
    arguments = (seed, options, num_nodes, not RULES[name].trees, drawn, nan_node)
    (verdict,) = RULES[name].verify([make_case(*arguments)], Sampler(VOCAB))
    expected = judged(make_case(*arguments), CLASSIC[name])
    assert same(verdict, expected), (verdict, expected)


def test_traversal_of_a_chain_is_block_verification():
    for seed in range(50):
        (by_path,) = RULES["traversal"].verify([make_case(seed, OPTIONS[0], 5, chain=True)], Sampler(VOCAB))
        (by_block,) = RULES["block"].verify([make_case(seed, OPTIONS[0], 5, chain=True)], Sampler(VOCAB))
        assert same(by_path, by_block)


def batch(chain):
    """Cases of all kinds, each new: rules advance the samplers."""
    shared = make_case(0, OPTIONS[1], 4, chain)
    other = make_case(1, OPTIONS[3], 6, chain)
    return [
        shared,
        make_case(2, OPTIONS[0], 4, chain, draws=shared.draws, tokens=shared.tokens, parents=shared.parents),
        make_case(3, {"temperature": 0.0}, 5, chain),
        make_case(4, OPTIONS[0], 0, chain, draws=None),
        make_case(5, OPTIONS[0], 3, chain, drawn=0.0, draws=None),
        other,
        make_case(6, OPTIONS[2], 5, chain, nan_node=-1),
        make_case(7, OPTIONS[4], 5, chain),
    ]


@pytest.mark.parametrize("name", RULES)
def test_a_case_gets_the_same_verdict_alone_and_in_a_batch(name):
    verify, chain = RULES[name].verify, not RULES[name].trees
    together = verify(batch(chain), Sampler(VOCAB))
    alone = [verify([case], Sampler(VOCAB))[0] for case in batch(chain)]
    assert all(same(one, other) for one, other in zip(together, alone, strict=True))
    assert [verdict.error is not None for verdict in together] == [index == 6 for index in range(8)]


@pytest.mark.parametrize("name", CLASSIC)
def test_a_batch_larger_than_the_buffer_is_decided_in_parts(name, monkeypatch):
    verify, chain = RULES[name].verify, not RULES[name].trees
    whole = verify(batch(chain), Sampler(VOCAB))
    monkeypatch.setattr("paceline.verify.classic._BUFFER_BYTES", 1)
    assert all(map(same, verify(batch(chain), Sampler(VOCAB)), whole))


@pytest.mark.parametrize("name", CLASSIC)
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.0, "frequency_penalty": 1.0}])
def test_greedy_requests_get_the_pathwise_verdict(name, options):
    for seed in range(20):
        arguments = (seed, options, 6, not RULES[name].trees)
        (verdict,) = RULES[name].verify([make_case(*arguments)], Sampler(VOCAB))
        assert same(verdict, verify_pathwise([make_case(*arguments)], Sampler(VOCAB))[0])


@pytest.mark.parametrize("name", CLASSIC)
def test_without_a_draft_the_token_is_that_of_plain_decoding(name):
    for seed in range(20):
        arguments = (seed, OPTIONS[3], 0)
        (verdict,) = RULES[name].verify([make_case(*arguments)], Sampler(VOCAB))
        assert same(verdict, verify_pathwise([make_case(*arguments)], Sampler(VOCAB))[0])


@pytest.mark.parametrize("name", CLASSIC)
def test_the_state_follows_the_new_tokens(name):
    case = make_case(8, OPTIONS[3], 5, not RULES[name].trees)
    expected = make_case(8, OPTIONS[3], 5, not RULES[name].trees).sampling
    sampler = Sampler(VOCAB)
    (verdict,) = RULES[name].verify([case], sampler)
    logits = np.zeros(VOCAB, dtype=np.float32)
    after = sampler.probabilities(case.sampling, logits, 9)
    assert np.array_equal(after, sampler.probabilities(expected.branch(verdict.tokens), logits, 9))


@pytest.mark.parametrize("name", CLASSIC)
def test_a_certain_draft_is_accepted_whole_and_an_impossible_one_refused(name):
    certain = np.full((4, VOCAB), -np.inf, dtype=np.float32)
    certain[range(4), [5, 6, 7, 8]] = 0.0
    for seed in range(20):
        right = make_case(seed, {}, 3, True, 0.0, logits=certain, tokens=[5, 6, 7], num_logprobs=None)
        wrong = replace(right, tokens=[6, 5, 8])
        right, wrong = RULES[name].verify([right, wrong], Sampler(VOCAB))
        assert (right.accepted, right.tokens) == ((0, 1, 2), (5, 6, 7, 8))
        assert (wrong.accepted, wrong.tokens) == ((), (5,))


@pytest.mark.parametrize("name", CLASSIC)
def test_nothing_follows_a_token_that_ends_the_request(name):
    logits = np.full((4, VOCAB), -np.inf, dtype=np.float32)
    logits[range(4), [5, ENDING, 7, 8]] = 0.0
    case = make_case(0, {}, 3, True, 0.0, logits=logits, tokens=[5, ENDING, 7], num_logprobs=None)
    (verdict,) = RULES[name].verify([case], Sampler(VOCAB))
    assert (verdict.accepted, verdict.tokens) == ((0, 1), (5, ENDING))
    (verdict,) = RULES[name].verify([replace(case, is_last=lambda _, count: count >= 3)], Sampler(VOCAB))
    assert (verdict.accepted, verdict.tokens) == ((0,), (5,))


@pytest.mark.parametrize("name", CLASSIC)
def test_unusable_logits_are_an_error_only_where_the_text_goes(name):
    logits = np.full((3, VOCAB), -np.inf, dtype=np.float32)
    logits[0, 5] = 0.0
    logits[1:] = np.nan
    refused = make_case(0, {}, 2, True, 0.0, logits=logits, tokens=[6, 7], num_logprobs=None)
    followed = replace(refused, tokens=[5, 7])
    masked = replace(refused, logits=np.full((3, VOCAB), -np.inf, dtype=np.float32))
    verdicts = RULES[name].verify([followed, refused, masked], Sampler(VOCAB))
    assert isinstance(verdicts[0].error, BackendError)
    assert (verdicts[1].tokens, verdicts[1].error) == ((5,), None)
    assert isinstance(verdicts[2].error, BackendError)


def test_block_verification_refuses_a_tree():
    case = make_case(0, {}, 2, tokens=[1, 2], parents=[-1, -1])
    with pytest.raises(ValueError, match="chains only"):
        RULES["block"].verify([case], Sampler(VOCAB))
