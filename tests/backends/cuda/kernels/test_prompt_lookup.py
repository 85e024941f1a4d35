"""Chains drafted on the device: from the host's draft, or those of the host's ngram drafter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.async_decoding import NgramLookup
from paceline.core.params import SamplingParams
from paceline.core.trees import DraftPlan
from paceline.draft.lookup.ngram import NgramDrafter
from paceline.draft.lookup.suffix import SuffixDrafter, SuffixOptions
from tests.backends.cuda.decode.test_decode_loop import LENGTH, Case
from tests.backends.cuda.test_backend import make, needs_gpu
from tests.draft.reference import host_draft_chain, ngram_chain
from tests.draft.requests import chains, make_request
from tests.engines import new_engine
from tests.tiny import save_checkpoint
from tests.tiny_families import VOCAB_SIZE
from tests.toy import ToyTokenizer, drain

LONGEST, CHAIN, SLOTS, DRAFTED = 80, 5, 6, 11
HostDraft = tuple[int, list[int]]  # the position of its first token, and its tokens
BLOCK = 16  # so that texts have several
EXAMPLES = 200 if torch.cuda.is_available() else 25  # the interpreter is slow


def on_the_host(text: list[int], shortest: int, longest: int, most: int) -> list[int]:
    drafter = NgramDrafter(NgramDrafter.Options(prompt_lookup_max=longest, prompt_lookup_min=shortest))
    if most <= 0:
        return []
    return chains(drafter.propose([make_request(text)], [DraftPlan("ngram", most)]))[0]


def on_the_device(
    texts: dict[int, list[int]],
    slots: list[int],
    options: NgramLookup | None,
    device: torch.device,
    limits: dict[int, int] | None = None,
    most_drafted: dict[int, int] | None = None,
    host_drafts: list[HostDraft] | None = None,
) -> list[list[int]]:
    """The chains of these slots; after each text the state has what would continue its repetition."""
    from paceline.backends.cuda.kernels.drafting.prompt_lookup import prompt_lookup
    from paceline.backends.cuda.kernels.step_rows import LINES, StepRows, make_requests

    state = make_requests(SLOTS, LONGEST, 16, device)
    state.tokens.fill_(1)
    for slot, text in texts.items():
        state.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        state.lengths[slot] = len(text) - 1
        state.limits[slot] = (limits or {}).get(slot, LONGEST)
    for slot, most in (most_drafted or {}).items():
        state.most_drafted[slot] = most
    nodes = 1 + CHAIN
    written = torch.full((LINES, len(slots) * nodes), -9, dtype=torch.int32, device=device)
    found = torch.full((len(slots),), -9, dtype=torch.int32, device=device)
    rows = StepRows(written, written)
    own = torch.tensor(slots, dtype=torch.int32, device=device)
    lines = None if host_drafts is None else torch.full((len(slots), 1 + DRAFTED), -1, dtype=torch.int32)
    for line, (start, expected) in zip(() if lines is None else lines, host_drafts or (), strict=True):
        line[: 1 + len(expected)] = torch.tensor([start, *expected])
    sent = None if lines is None else lines.to(device)
    path = torch.arange(nodes, dtype=torch.int32, device=device)
    prompt_lookup(own, state, options, sent, rows, path, nodes, found, largest_block=BLOCK)
    tokens = written[0].view(len(slots), nodes)
    assert (tokens[:, 0] == -9).all()  # the root's token is written by others
    assert (written[1:] == -9).all()
    assert ((tokens[:, 1:] >= 0) | (found == -9)[:, None]).all()
    return [line[1 : 1 + count].tolist() for line, count in zip(tokens, found.tolist(), strict=True)]


@settings(max_examples=EXAMPLES)
@given(st.data(), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3))
def test_the_device_finds_what_the_host_finds(data, shortest, more, letters):  # type: ignore[no-untyped-def]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest = shortest + more
    texts = {
        slot: data.draw(st.lists(st.integers(0, letters), min_size=1, max_size=LONGEST - 1))
        for slot in (0, 2, 5)
    }
    found = on_the_device(texts, [2, -1, 5, 0], NgramLookup(shortest, longest), device)
    hosts = {slot: on_the_host(text, shortest, longest, CHAIN) for slot, text in texts.items()}
    assert found == [hosts[2], [], hosts[5], hosts[0]]


def test_texts_of_many_blocks(device: torch.device) -> None:
    """The newest of equals, the longest of all, and both in other blocks than the end."""
    quiet = list(range(100, 100 + 3 * BLOCK))
    texts = {
        0: [1, 2, 3, 40, *quiet, 1, 2, 3, 50, 51, 52, 53, 54, *quiet[:9], 1, 2, 3],
        1: [1, 2, 3, 41, 42, 43, 44, 45, *quiet, 2, 3, 50, *quiet[:9], 1, 2, 3],
        2: [*quiet, 7, 8],
        3: [9, *([4] * 60)],
    }
    assert all(len(text) <= LONGEST for text in texts.values())
    found = on_the_device(texts, [0, 1, 2, 3], NgramLookup(2, 4), device)
    assert found == [[50, 51, 52, 53, 54], [41, 42, 43, 44, 45], [], [4] * 5]


def test_what_no_request_can_have_is_not_drafted(device: torch.device) -> None:
    """Beyond a limit or what a request takes, and for padding."""
    text = [1, 2, 3, 4, 5, 6, 1, 2]
    texts = dict.fromkeys(range(6), text)
    limits = {0: LONGEST, 1: len(text) + 2, 2: len(text), 3: len(text) - 1}
    slots, takes = [0, 1, 2, 3, 4, 5, -1], {4: 0, 5: 3}
    found = on_the_device(texts, slots, NgramLookup(2, 4), device, limits, takes)
    assert found == [[3, 4, 5, 6, 1], [3, 4], [], [], [], [3, 4, 5], []]
    assert found[1] == on_the_host(text, 2, 4, limits[1] - len(text))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (range(6), [9, 3, 4, 5, 6, 1, 9, 9, 9, 9, 0, 0]),
        ((0, 1, 4), [9, 3, 9, 9, 4, 9, 9, 9, 9, 9, 9, 9]),  # of a tree, whose other nodes stay
    ],
)
def test_where_nothing_is_found_the_tokens_of_a_network_stay(
    path: Sequence[int], expected: list[int], device: torch.device
) -> None:
    from paceline.backends.cuda.kernels.drafting.prompt_lookup import prompt_lookup
    from paceline.backends.cuda.kernels.step_rows import LINES, StepRows, make_requests

    state = make_requests(2, LONGEST, 16, device)
    for slot, text in enumerate(([1, 2, 3, 4, 5, 6, 1, 2], [1, 2, 3, 4])):
        state.tokens[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
        state.lengths[slot] = len(text) - 1
    drafted = torch.full((LINES, 12), 9, dtype=torch.int32, device=device)
    slots, found = torch.arange(2, dtype=torch.int32, device=device), torch.zeros_like(state.lengths)
    nodes = torch.tensor(path, dtype=torch.int32, device=device)
    prompt_lookup(slots, state, NgramLookup(2, 4), None, StepRows(drafted, drafted), nodes, 6, found, kept=3)
    assert drafted[0].tolist() == expected
    assert found.tolist() == [len(path) - 1, 0]


def by_reference(text: list[int], host_draft: HostDraft, options: NgramLookup | None, most: int) -> list[int]:
    """The chain after a text: the rest of the host's draft, if it matches, or else what is looked up."""
    most = min(most, CHAIN)
    chain = host_draft_chain(text, *host_draft, most)
    if not chain and options is not None:
        chain = on_the_host(text, options.shortest, options.longest, most)
    return chain


@st.composite
def host_draft_of(draw: st.DrawFn, text: list[int], letters: int) -> HostDraft:
    """A draft that begins before or after the end, often matches, and may be empty."""
    near = st.integers(max(len(text) - 4, 0), len(text))
    start = draw(st.one_of(near, near, st.integers(-1, len(text) + 3)))
    right = text[max(start, 0) :] if draw(st.integers(0, 3)) else []
    guessed = draw(st.lists(st.integers(0, letters), max_size=DRAFTED))
    return start, [*right, *guessed][:DRAFTED]


@settings(max_examples=EXAMPLES)
@given(st.data(), st.booleans(), st.integers(1, 3))
def test_the_device_follows_host_drafts_as_the_reference_does(data, supports_lookup, letters):  # type: ignore[no-untyped-def]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    slots, texts, host_drafts, limits = [5, -1, 0, 2, 1], {}, [], {}
    for slot in slots:
        text = data.draw(st.lists(st.integers(0, letters), min_size=1, max_size=LONGEST - 1))
        host_drafts.append(data.draw(host_draft_of(text, letters)))
        if slot >= 0:
            texts[slot], limits[slot] = text, min(len(text) + data.draw(st.integers(-1, CHAIN + 2)), LONGEST)
    options = NgramLookup(1, 3) if supports_lookup else None
    found = on_the_device(texts, slots, options, device, limits, most_drafted={1: 0}, host_drafts=host_drafts)
    for slot, host_draft, chain in zip(slots, host_drafts, found, strict=True):
        if slot in (-1, 1):
            assert chain == []
        else:
            most = max(limits[slot] - len(texts[slot]), 0)
            assert chain == by_reference(texts[slot], host_draft, options, most)


LED = [40, 41, 42, 43, 44, 45]
REPEATS = [1, 2, 30, 31, 40, 41, 1, 2]  # behind 1, 2 there is something to look up


@pytest.mark.parametrize("options", [None, NgramLookup(2, 4)])
@pytest.mark.parametrize(
    ("text", "host_draft", "chain"),
    [
        ([1, 2], (2, LED), LED[:5]),  # nothing was chosen since
        ([1, 2, 40], (2, LED), LED[1:6]),
        ([1, 2, 40, 41, 42], (2, LED), LED[3:]),  # it ends before the chain is full
        ([1, 2, *LED[:5]], (2, LED), LED[5:]),
        ([1, 2, 40, 41, 42], (0, [1, 2, *LED]), LED[3:]),
        ([7], (1, LED[:1]), LED[:1]),
        ([1, 2, 40, 30, 31, 1, 2, 40], (7, LED), LED[1:6]),  # it is preferred to what could be looked up
    ],
)
def test_a_host_draft_that_matches_the_sampled_tokens_gives_the_chain(  # type: ignore[no-untyped-def]
    text, host_draft, chain, options, device
) -> None:
    assert on_the_device({2: text}, [2], options, device, host_drafts=[host_draft]) == [chain]
    assert by_reference(text, host_draft, options, LONGEST) == chain


@pytest.mark.parametrize(
    "host_draft",
    [
        (-1, []),  # none
        (-1, [*REPEATS, 40, 41]),
        (8, []),
        (6, [1, 2]),  # it ends where the text does
        (3, [31, 40, 41]),  # and before
        (6, [1, 3, *LED]),  # wrong at its end
        (6, [2, 2, *LED]),  # wrong at its beginning
        (9, LED),  # it begins behind what comes next
        (70, LED),
    ],
)
def test_without_a_matching_host_draft_the_text_is_looked_up(host_draft, device) -> None:  # type: ignore[no-untyped-def]
    assert on_the_device({2: REPEATS}, [2], NgramLookup(2, 4), device, host_drafts=[host_draft]) == [
        REPEATS[2:7]
    ]
    assert on_the_device({2: REPEATS}, [2], None, device, host_drafts=[host_draft]) == [[]]


def test_host_drafts_are_read_by_row_and_not_beyond_the_limit(device: torch.device) -> None:
    texts = {slot: [1, 2, 40] for slot in range(5)}
    limits = {0: LONGEST, 1: 5, 2: 3, 3: 2}
    host_drafts = [*[(2, LED)] * 5, (0, LED)]
    slots = [0, 1, 2, 3, 4, -1]
    found = on_the_device(texts, slots, None, device, limits, {4: 0}, host_drafts=host_drafts)
    assert found == [LED[1:6], LED[1:3], [], [], [], []]
    host_drafts = [(-1, []), (2, LED)]
    assert on_the_device(texts, [3, 0], None, device, host_drafts=host_drafts) == [[], LED[1:6]]


def test_steps_that_follow_host_drafts_keep_the_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """The host's draft is right but for its end, and the second step goes on with it."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    expected, _ = Case(0.0, device, dtype).run(None, 5)
    case = Case(0.0, device, dtype)
    loop = DecodeLoop(case.weights, case.pool(), case.state, 2, 16, None, chain_shape(2), host_drafts=DRAFTED)
    assert loop.host_drafts is not None
    assert loop.host_drafts.tolist() == [[-1] * (1 + DRAFTED)] * 2
    host_draft = torch.tensor([LENGTH + 1, *expected[:4], (expected[4] + 1) % 40], dtype=torch.int32)
    loop.host_drafts[0, : len(host_draft)] = host_draft
    loop.begin([1], 2)
    given = []
    for found, count in ((2, 3), (2, 2)):
        loop.step(2)
        assert loop.found.tolist() == [found, 0]
        assert loop.counts.tolist() == [count, 0]
        given += loop.output[0, :count].tolist()
    assert given == expected
    loop.step(2)  # it was wrong: nothing is drafted
    assert loop.found.tolist() == [0, 0]


def test_prompt_lookup_does_not_change_tokens(device: torch.device, dtype: torch.dtype) -> None:
    """The text is made so that the first step finds what is right, and the state takes what it gave."""
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    plain, _ = Case(0.0, device, dtype).run(None, 3)
    case = Case(0.0, device, dtype)
    case.state.tokens[1, 2:6] = torch.tensor(
        [*case.state.tokens[1, LENGTH - 1 : LENGTH + 1].tolist(), *plain[:2]]
    )
    expected, _ = case.run(None, 3)  # of this text
    case = Case(0.0, device, dtype)
    before = case.state.tokens[1, LENGTH - 1 : LENGTH + 1].tolist()
    case.state.tokens[1, 2:6] = torch.tensor([*before, *expected[:2]])
    loop = DecodeLoop(
        case.weights, case.pool(), case.state, 2, 16, None, chain_shape(2), look_up=NgramLookup(2, 4)
    )
    loop.begin([1], 2)
    loop.step(2)
    assert loop.found.tolist() == [2, 0]
    assert loop.counts.tolist() == [3, 0]
    assert loop.output[0].tolist() == expected
    assert case.state.tokens[1, LENGTH + 1 : LENGTH + 4].tolist() == expected


def test_texts_are_written_to_their_slots_up_to_their_ends(device: torch.device) -> None:
    """What passes have sampled since then stays."""
    from tests.backends.cuda.decode.test_async_decoder import joining, make_decoder

    decoder = make_decoder(device)
    decoder.join(joining([4, 2], [9, 3]))
    decoder.write_texts([4, 2], [np.arange(8, dtype=np.int32), np.arange(100, 104, dtype=np.int32)])
    assert decoder._requests.tokens[4, :11].tolist() == [*range(8), 44, 54, 0]
    assert decoder._requests.tokens[2, :5].tolist() == [100, 101, 102, 103, 0]


def foretold(prompt: list[int], output: list[int]) -> tuple[int, int, int]:
    """Steps with drafts, drafted and accepted tokens, if all but the first token come by steps that look up.

    Where nothing is found the chain is of zeros, which may be right.
    """
    steps = drafted = accepted = 0
    done = 1
    while done < len(output):
        most = min(CHAIN, len(output) - done - 1)
        found = ngram_chain([*prompt, *output[:done]], 1, 4, most)
        right = 0
        for token, chosen in zip(found or [0] * most, output[done:], strict=False):
            if token != chosen:
                break
            right += 1
        if found:
            steps, drafted, accepted = steps + 1, drafted + len(found), accepted + right
        done += 1 + right
    return steps, drafted, accepted


@needs_gpu
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_an_engine_whose_passes_look_up_gives_the_tokens_of_off(
    temperature: float,
    tmp_path: Path,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """More requests than slots, and what was drafted is what the texts, or past responses, say.

    No chunk of a prompt is its last token alone: a pass that looks up would compute it.
    """
    from paceline.control.controller import FixedController
    from paceline.core.trees import PLAIN
    from paceline.engine.admission import Limits
    from paceline.models.registry import load_checkpoint

    checkpoint = load_checkpoint(save_checkpoint("llama", tmp_path / "llama"))
    prompts = [np.random.default_rng(n).integers(2, 5 + n, 3 + 4 * n).tolist() for n in range(7)]

    def outputs(plan: DraftPlan, times: int = 1) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
        ngram = NgramDrafter(NgramDrafter.Options(prompt_lookup_min=1))
        drafters = {"ngram": ngram, "suffix": SuffixDrafter(SuffixOptions())}
        backend, limits = make(checkpoint, device, dtype), Limits(VOCAB_SIZE, 128, 4, 32)
        controller = FixedController(plan)
        engine = new_engine(
            backend, ToyTokenizer(), limits, num_pages=80, drafters=drafters, controller=controller
        )
        results = []
        for number, prompt in [*enumerate(prompts)] * times:
            own = SamplingParams(
                temperature=temperature, seed=number, max_tokens=60 + number, ignore_eos=True
            )
            results.append(engine.add_request(prompt, own)[0])
            if len(results) % len(prompts) == 0:
                drain(engine, scribble=False)
        assert all(request.error is None and not request.failed_drafters for request in results)
        results = results[-len(prompts) :]
        counts = [request.speculative for request in results]
        return [request.output_token_ids for request in results], [
            (own.num_spec_steps, own.num_draft_tokens, own.num_accepted_draft_tokens) for own in counts
        ]

    expected, _ = outputs(PLAIN)
    looked_up, counts = outputs(DraftPlan("ngram", CHAIN))
    assert looked_up == expected
    assert counts == [foretold(prompt, own) for prompt, own in zip(prompts, expected, strict=True)]
    assert sum(accepted for _, _, accepted in counts) > 0
    led, counts = outputs(DraftPlan("suffix", CHAIN), times=2)  # once more, when all responses are known
    assert led == expected
    for (_, _, accepted), own in zip(counts, expected, strict=True):
        assert accepted > 0.75 * len(own) * CHAIN / (1 + CHAIN)
