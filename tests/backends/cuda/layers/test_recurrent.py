"""Recurrences along chains and trees agree with torch's, and states follow accepted paths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backends.torch.backend import TorchBackend
from paceline.core.forward import ForwardBatch, RequestStates
from paceline.models.config import ModelConfig, RecurrentConfig, RopeConfig
from paceline.models.files.layout import expected_tensors
from paceline.models.registry import load_checkpoint
from paceline.models.transformer.recurrent import RECURRENCES, State, StateView, scan
from tests.backends.cuda.decode.test_decode_loop import random_weights
from tests.backends.cuda.test_backend import make
from tests.tiny import save_checkpoint

HIDDEN, SLOTS, SLOT, EPS = 12, 4, 2, 1e-2
TREE = [-1, 0, 0, 1, 2, -1]
SIZES = {"key_heads": 2, "value_heads": 4, "key_dim": 6, "value_dim": 10}
KINDS: dict[str, dict[str, Any]] = {
    "short_conv": {"conv_bias": True},
    "gated_delta": SIZES,
    "gated_delta tiled": {**SIZES, "tiled_values": True},
    "mamba2": {**SIZES, "conv_bias": True, "norm_groups": 2},
}


class Case:
    """A recurrent layer with random parameters, and rows that it reads."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        from paceline.backends.cuda.kernels.recurrent.types import RecurrentBuffers, recurrent_shape
        from paceline.backends.cuda.layers.recurrent import Recurrences, load_parameters

        torch.manual_seed(3)
        kind = name.split()[0]
        recurrent = RecurrentConfig(kind, frozenset([0]), conv_kernel=4, **KINDS[name])
        config = ModelConfig(
            "lfm2", 20, HIDDEN, 1, 2, 1, 6, 8, EPS, RopeConfig(), 16, True, recurrent=recurrent
        )
        tensors = {name: torch.randn(shape) / 2 for name, shape in expected_tensors(config)}
        self.reference = RECURRENCES[kind](tensors.__getitem__, "model.layers.0", config, recurrent)
        parameters = load_parameters(config, lambda name: tensors[name].to(device))
        assert parameters is not None
        self.parameters, self.shape = parameters, recurrent_shape(recurrent, HIDDEN)
        self.ours, self.rows = Recurrences(config, parameters, 8, device), len(TREE)
        self.projected = torch.randn(self.rows, self.shape.width).to(dtype)
        self.states = self.ours.make_states(SLOTS)
        for tensor in vars(self.states.tensors).values():
            tensor.copy_(torch.randn(tensor.shape))

        def zeros(*sizes: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(sizes, dtype=kind, device=device)

        ssm = self.states.tensors.ssm.shape[2:]
        self.buffers = RecurrentBuffers(
            zeros(1, 8, self.shape.width, kind=dtype),
            zeros(1, 8, self.shape.channels),
            zeros(8, self.shape.values),
            zeros(8, self.shape.values, kind=dtype),
            zeros(4, *ssm),
        )
        self.buffers.projected[0, : self.rows] = self.projected.to(device)

    def state(self, slot: int) -> State:
        """The state of a slot as transformer/recurrent.py has it; Mamba2's matrices are transposed there."""
        own = self.states.tensors
        conv, ssm = own.conv[0, slot].cpu().clone(), own.ssm[0, slot].cpu().clone()
        ssm = ssm.transpose(1, 2) if self.shape.config.kind == "mamba2" else ssm
        return (conv,) if self.shape.rate < 0 else (conv, ssm)

    def run(self, has_context: bool) -> torch.Tensor:
        """What a pass over the rows gives: [rows, values]."""
        from paceline.backends.cuda.kernels.recurrent.output import gate
        from paceline.backends.cuda.kernels.recurrent.scan import convolve, scan_states
        from paceline.backends.cuda.layers.recurrent import plan_scans

        count = np.zeros(self.rows, np.int32)
        batch = ForwardBatch(
            count,
            count,
            np.array(TREE, np.int32),
            np.array([0, self.rows], np.int32),
            np.array([5 * has_context], np.int32),
            np.zeros((1, 1), np.int32),
            count[:0],
            None,  # type: ignore[arg-type]
            states=RequestStates(self.states, np.array([SLOT], np.int32)),
        )
        plan = plan_scans(batch)
        assert plan.nodes == 3  # rows 2, 3 and 4 continue others than the row before them
        rows, shape, buffers = self.ours.rows(plan, batch, 8), self.shape, self.buffers
        tables = rows.parents, rows.slots
        convolve(shape, self.parameters, 0, buffers, rows.states, *tables)
        if shape.rate >= 0:
            own, nodes = slice(0, 1), buffers.nodes[None]
            scan_states(shape, self.parameters, own, buffers, rows.states, nodes, rows.scans, writes=True)
        gate(shape, self.parameters, 0, buffers, self.rows)
        return buffers.gated[: self.rows].float().cpu()


@pytest.mark.parametrize("has_context", [True, False], ids=["after a context", "at the beginning"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_and_its_accepted_path_are_those_of_torch(
    kind: str, has_context: bool, device: torch.device, dtype: torch.dtype
) -> None:
    case = Case(kind, device, dtype)
    first = case.state(SLOT) if has_context else tuple(torch.zeros_like(part) for part in case.state(SLOT))
    others = [case.state(slot) for slot in (0, 1)]
    view = StateView(slice(0, case.rows), TREE, SLOT)
    expected = scan(case.reference, {-1: first}, case.projected, view)
    torch.testing.assert_close(case.run(has_context), torch.stack(expected), rtol=1e-2, atol=1e-2)

    case.ours.advance(case.buffers, case.states.tensors, SLOT, [0, 2, 4], {1: 3})
    state, states = first, []
    for row in (0, 2, 4):
        state, _ = case.reference.step(state, case.projected[row])
        states.append(state)
    for slot, after in ((3, states[0]), (SLOT, states[2])):
        for got, own in zip(case.state(slot), after, strict=True):
            torch.testing.assert_close(got, own, rtol=1e-3, atol=1e-3)
    for before, slot in zip(others, (0, 1), strict=True):
        assert all(torch.equal(mine, its) for mine, its in zip(before, case.state(slot), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_replaces_its_state_has_the_bits_of_a_scan(
    kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Rows of slots 2 and 0 and a padding row; the second is beyond its request's limit."""
    from paceline.backends.cuda.kernels.recurrent.output import NewConvStates, gate
    from paceline.backends.cuda.kernels.recurrent.scan import convolve, scan_states, store_conv_states
    from paceline.backends.cuda.kernels.recurrent.step import step_states
    from paceline.backends.cuda.kernels.recurrent.types import FIRST, Scans, StateTensors

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def results(states: StateTensors) -> list[torch.Tensor]:
        return [buffers.gated[:2].clone(), states.conv, states.ssm]

    case = Case(kind, device, dtype)
    shape, buffers, known = case.shape, case.buffers, (case.shape, case.parameters)
    own = case.states.tensors
    scanned, stepped = (StateTensors(own.conv.clone(), own.ssm.clone()) for _ in range(2))
    slots, none = integers(2, 0, -1), integers(-1, -1, -1)

    convolve(*known, 0, buffers, scanned, none, slots)
    rows, counts = integers(0, 1, 2), integers(1, 1, 0)
    scans = Scans(rows, integers(FIRST, FIRST, FIRST), integers(2, -1, -1), rows, counts, integers(2, 0, 0))
    if shape.rate >= 0:
        scan_states(*known, slice(0, 1), buffers, scanned, scanned.ssm, scans, writes=True)
    gate(*known, 0, buffers, 3)
    kept = integers(1, 0, 0)[:, None], integers(2, -1, -1)[:, None]
    store_conv_states(shape, buffers, scanned, rows, rows, slots, *kept)
    expected = results(scanned)
    assert not torch.equal(scanned.conv, own.conv)

    buffers.gated.zero_()
    buffers.read.zero_()
    advances = integers(7, -1, -1)
    if shape.rate >= 0:
        step_states(*known, 0, buffers, stepped, slots, advances)
    else:
        convolve(*known, 0, buffers, stepped, none, slots)
    gate(*known, 0, buffers, 3, NewConvStates(stepped.conv, slots, advances))
    assert all(map(torch.equal, results(stepped), expected))


HYBRID = ModelConfig(
    "qwen3_5_text", 60, 32, 2, 2, 1, 16, 64, 1e-5, RopeConfig(500.0), 64, tie_embeddings=True,
    recurrent=RecurrentConfig("gated_delta", frozenset([0]), conv_kernel=3, norm_groups=1, **SIZES),
)  # fmt: skip


def decoded(
    device: torch.device, dtype: torch.dtype, guesses: list[list[int]], shape: Any, limit: int = 32
) -> Any:
    """A request in slot 1, beside padding, stepped on the device: its tokens, and the states of all slots.

    The draft of each step has the next of `guesses`. The request has pages for `limit` tokens.
    """
    from paceline.backends.cuda.decode.decode_loop import DecodeLoop, make_requests
    from paceline.backends.cuda.layers.recurrent import Recurrences
    from paceline.backends.cuda.passes.kv_pool import Pool

    weights = random_weights(device, dtype, config=HYBRID)
    requests = make_requests(2, 32, 16, device)
    requests.tokens[1, :6] = torch.tensor([7, 3, 40, 8, 2, 9])
    requests.pages[1], requests.lengths[1], requests.limits[1] = torch.tensor([1, 0]), 5, limit
    states = Recurrences(HYBRID, weights.recurrent, 8, device).make_states(2).tensors
    generator = torch.Generator().manual_seed(4)
    keys, values, *parts = (
        torch.randn(tensor.shape, generator=generator).to(device)
        for tensor in (torch.empty(1, 32, 1, 16), torch.empty(1, 32, 1, 16), states.conv, states.ssm)
    )
    for own, given in zip((states.conv, states.ssm), parts, strict=True):
        own.copy_(given)
    pool = Pool(2, 0, keys.to(dtype), values.to(dtype))
    loop = DecodeLoop(weights, pool, requests, 2, 16, given=shape, states=states)
    loop.begin([1], 2)
    tokens: list[int] = []
    for guess in guesses:
        loop.drafted(2)[0, 1:] = torch.tensor(guess, dtype=torch.int32)
        loop.step(2)
        tokens += loop.output[0, : int(loop.counts[0])].tolist()
    return tokens, [part.cpu() for part in (states.conv, states.ssm)]


def test_states_follow_the_nodes_that_a_step_on_the_device_has_accepted(
    device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.decode.draft_shape import DraftShape, chain_shape

    (first, second, third, last), plain = decoded(device, dtype, [[]] * 4, chain_shape(0))
    assert plain[0][:, 0].abs().sum() > 0  # the other slot has a state, which stays as it is
    wrong = (first + 1) % 60
    tokens, states = decoded(device, dtype, [[first, wrong], [third, wrong]], chain_shape(2))
    assert tokens == [first, second, third, last]
    tree = DraftShape((-1, 0, 0, 2, 3))  # the path goes through the second child
    tokens, in_tree = decoded(device, dtype, [[wrong, first, second, third]], tree)
    assert tokens == [first, second, third, last]
    for own, after_chains, after_tree in zip(plain, states, in_tree, strict=True):
        assert torch.equal(own, after_chains)
        assert torch.equal(own, after_tree)


@pytest.mark.parametrize("levels", [0, 1])
def test_states_stay_when_a_request_has_reached_its_limit(
    levels: int, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.decode.draft_shape import chain_shape

    (first, second), states = decoded(device, dtype, [[0] * levels] * 2, chain_shape(levels), limit=7)
    tokens, later = decoded(device, dtype, [[0] * levels] * 4, chain_shape(levels), limit=7)
    assert tokens == [first, second]
    assert all(map(torch.equal, states, later))


def request_rows(backend: Any, pools: tuple[Any, Any], context: int, tokens: list[int], parents: list[int]):  # type: ignore[no-untyped-def]
    """The logits of these rows of one request, whose state is in slot 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    batch = ForwardBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(depths, np.int32) + np.int32(context),
        parents=np.array(parents, np.int32),
        row_offsets=np.array([0, len(tokens)], np.int32),
        context_lengths=np.array([context], np.int32),
        page_tables=np.arange(4, dtype=np.int32)[None],
        logit_rows=np.arange(len(tokens), dtype=np.int32),
        pool=pools[0],
        states=RequestStates(pools[1], np.array([1], np.int32)),
    )
    return backend.forward(batch).logits.copy()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="interpreted, whole models take minutes")
@pytest.mark.parametrize(
    "family", ["qwen3-5", "lfm2", "granite-hybrid", "qwen3-next", "nemotron-h", "falcon-h1"]
)
def test_a_hybrid_equals_torch_and_a_path_has_the_bits_of_its_tree(
    family: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    checkpoint = load_checkpoint(save_checkpoint(family, tmp_path))
    prompt, chain = list(range(3, 12)), list(range(-1, 8))

    def in_a_tree(backend: Any) -> np.ndarray:
        """A prompt of two chunks, then a tree whose rows 0, 2 and 3 are a path."""
        pools = backend.make_pool(4), backend.make_states(3)
        first = request_rows(backend, pools, 0, prompt[:4], chain[:4])
        backend.advance_state(pools[1], 1, range(4), {2: 2})
        second = request_rows(backend, pools, 4, prompt[4:], chain[:5])
        backend.advance_state(pools[1], 1, range(5), {})
        return np.concatenate(
            (first, second, request_rows(backend, pools, 9, [11, 22, 33, 44], [-1, 0, 0, 2]))
        )

    def one_by_one(backend: Any) -> np.ndarray:
        """The same path, a token at a time; the first two are computed twice, from a copied state."""
        pools, logits = (backend.make_pool(4), backend.make_states(3)), []
        for context, token in enumerate([*prompt, 11, 33, 44]):
            logits.append(request_rows(backend, pools, context, [token], [-1]))
            backend.advance_state(pools[1], 1, [0], {1: 2} if context == 1 else {})
        backend.copy_state(pools[1], 2, 1)
        again = request_rows(backend, pools, 2, [prompt[2]], [-1])
        assert np.array_equal(again, logits[2])
        return np.concatenate(logits)

    ours = make(checkpoint, device, dtype)
    tree = in_a_tree(ours)
    assert np.abs(tree - in_a_tree(TorchBackend.load(checkpoint))).max() < 0.5
    assert np.array_equal(one_by_one(ours), tree[[*range(9), 9, 11, 12]])


@pytest.mark.parametrize("family", ["lfm2", "qwen3-5"])
def test_graphs_of_other_states_have_other_names(
    family: str, tmp_path: Path, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph holds the addresses of the states that it was captured with: of none, when it is prepared."""
    from paceline.backends.cuda.passes import host_passes as module

    used: dict[object, set[int]] = {}  # by the name of a graph: the states that its work has read

    class Names:
        def __init__(self, device: torch.device) -> None:
            return

        def run(self, name: object, work: Any) -> None:
            self.name = name
            work()

    def note(*arguments: Any) -> None:
        *_, recurrent, _finishes = arguments
        used.setdefault(backend._passes.graphs.name, set()).add(recurrent.states.conv.data_ptr())

    for name in ("select", "run_lm_head", "take_best"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)
    monkeypatch.setattr(module, "sample_local", lambda *_: None)
    monkeypatch.setattr(module, "run_layers", note)
    monkeypatch.setattr(module, "Graphs", Names)
    backend = make(load_checkpoint(save_checkpoint(family, tmp_path)), device, dtype)
    pool, states = backend.make_pool(4), [backend.make_states(3) for _ in range(2)]
    backend.prepare(pool, 4, ())
    for own in states:
        request_rows(backend, (pool, own), 0, [3, 4, 5, 6], [-1, 0, 1, 2])
    assert set(map(len, used.values())) == {1}
