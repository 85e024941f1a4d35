"""Queries, keys and values come out normed and turned, and lie where they belong."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

HEADS, KV_HEADS, DIM, HIDDEN, EPS = 4, 2, 24, 128, 1e-5
POSITIONS, SLOTS = [5, 0, 9], [7, -1, 2]


@pytest.mark.parametrize("has_norm", [False, True], ids=["plain", "normed heads"])
def test_queries_stay_and_keys_and_values_go_to_their_kv_slots(
    has_norm: bool, device: torch.device, dtype: torch.dtype
) -> None:
    from paceline.backends.cuda.kernels.attention.heads import project_heads
    from paceline.backends.cuda.kernels.products import matrix

    torch.manual_seed(2)
    count = HEADS + 2 * KV_HEADS
    rows = torch.randn(16, HIDDEN).to(dtype)
    weight, bias = (torch.randn(count * DIM, HIDDEN) / 8).to(dtype), torch.randn(count * DIM).to(dtype)
    norms = (torch.randn(DIM).to(dtype), torch.randn(DIM).to(dtype)) if has_norm else None
    angles = torch.arange(16)[:, None] * torch.rand(DIM // 2)
    squares = rows.float().square().view(16, 2, -1).sum(-1)

    def there(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(value.to(device) for value in values)

    own = matrix.tile_heads(
        weight.to(device), DIM, matrix.Tiling(columns=64, step=64, splits=2), bias.to(device)
    )
    normed = matrix.Normed(*there(rows, squares), HIDDEN, EPS)
    positions, slot_mapping = there(torch.tensor(POSITIONS).int(), torch.tensor(SLOTS).int())
    query = torch.zeros(16, HEADS, DIM, dtype=dtype, device=device)
    keys, values = (torch.zeros(9, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2))
    scratch = matrix.scratch_for([own], 3, device)
    rotation, weights = there(angles.cos(), angles.sin()), None if norms is None else there(*norms)
    project_heads(normed, own, positions, slot_mapping, rotation, weights, query, keys, values, scratch)  # type: ignore[arg-type]

    plain = F.rms_norm(rows[:3].float(), (HIDDEN,), eps=EPS) @ weight.float().T + bias.float()
    expected_query, expected_keys, expected_values = plain.view(3, count, DIM).split(
        (HEADS, KV_HEADS, KV_HEADS), 1
    )
    cosine, sine = angles[POSITIONS].cos()[:, None], angles[POSITIONS].sin()[:, None]

    def turned(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            heads = F.rms_norm(heads, (DIM,), eps=EPS) * norm.float()
        one, two = heads.chunk(2, -1)
        return torch.cat((one * cosine - two * sine, two * cosine + one * sine), -1)

    query_norm, key_norm = norms or (None, None)
    bound = {"rtol": 1e-2, "atol": 2e-2}
    torch.testing.assert_close(query[:3].cpu().float(), turned(expected_query, query_norm), **bound)
    torch.testing.assert_close(keys[[7, 2]].cpu().float(), turned(expected_keys, key_norm)[[0, 2]], **bound)
    torch.testing.assert_close(values[[7, 2]].cpu().float(), expected_values[[0, 2]], **bound)
    untouched = [slot for slot in range(9) if slot not in SLOTS]
    assert not keys[untouched].any()
    assert not values[untouched].any()
    assert not scratch.counters.any()


def test_all_heads_of_a_row_may_be_normed_at_once(device: torch.device, dtype: torch.dtype) -> None:
    """As in olmo2: by one root mean square, then RoPE."""
    from paceline.backends.cuda.kernels.attention.heads import norm_heads

    torch.manual_seed(4)
    query, keys = (torch.randn(9, heads, DIM).to(device, dtype) for heads in (HEADS, KV_HEADS))
    norms = torch.randn(HEADS * DIM).to(device, dtype), torch.randn(KV_HEADS * DIM).to(device, dtype)
    angles = (torch.arange(16)[:, None] * torch.rand(DIM // 2)).to(device)
    cosine, sine = angles[POSITIONS].cos()[:, None], angles[POSITIONS].sin()[:, None]

    def expected(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        flat = heads.float().flatten(1)
        one, two = (F.rms_norm(flat, flat.shape[1:], eps=EPS) * norm.float()).view(heads.shape).chunk(2, -1)
        return torch.cat((one * cosine - two * sine, two * cosine + one * sine), -1)

    rows, slots = torch.tensor([0, 2], device=device), torch.tensor([7, 2], device=device)
    expected_query = expected(query[:3], norms[0])
    expected_keys = expected(keys[[7, 0, 2]], norms[1])[rows]
    before = keys.clone()
    where = torch.tensor(POSITIONS, device=device).int(), torch.tensor(SLOTS, device=device).int()
    norm_heads(query, keys, norms, EPS, *where, (angles.cos(), angles.sin()))
    torch.testing.assert_close(query[:3].float(), expected_query, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(keys[slots].float(), expected_keys, rtol=1e-2, atol=1e-2)
    untouched = [slot for slot in range(9) if slot not in SLOTS]
    assert torch.equal(keys[untouched], before[untouched])


@pytest.mark.parametrize("case", ["own", "values are keys", "shared"])
def test_a_separate_kernel_can_split_rows_into_heads(
    case: str, device: torch.device, dtype: torch.dtype
) -> None:
    """As in gemma4: norms of queries and keys have weights, that of values has none."""
    from paceline.backends.cuda.kernels.attention.split_heads import HeadSplit, split_heads

    torch.manual_seed(6)
    kv_heads = 0 if case == "shared" else KV_HEADS
    sizes = HEADS, kv_heads, 0 if case == "values are keys" else kv_heads
    projected = torch.randn(3, sum(sizes) * DIM + 8).to(device)  # and padding
    split = HeadSplit(HEADS, kv_heads, DIM, case == "values are keys", norms_values=True)
    norms = torch.randn(DIM).to(device, dtype), torch.randn(DIM).to(device, dtype)
    angles = (torch.arange(16)[:, None] * torch.rand(DIM // 2)).to(device)
    query = torch.zeros(3, HEADS, DIM, dtype=dtype, device=device)
    keys, values = (torch.zeros(9, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2))
    where = torch.tensor(POSITIONS, device=device).int(), torch.tensor(SLOTS, device=device).int()
    rotation = angles.cos(), angles.sin()
    split_heads(projected, split, norms, EPS, *where, rotation, query, keys, values)

    parts = projected[:, : sum(sizes) * DIM].view(3, -1, DIM).split(sizes, 1)
    cosine, sine = angles[POSITIONS].cos()[:, None], angles[POSITIONS].sin()[:, None]

    def turned(heads: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        one, two = (F.rms_norm(heads, (DIM,), eps=EPS) * norm.float()).chunk(2, -1)
        return torch.cat((one * cosine - two * sine, two * cosine + one * sine), -1)

    bound = {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(query.float(), turned(parts[0], norms[0]), **bound)
    untouched = [slot for slot in range(9) if slot not in SLOTS or case == "shared"]
    assert not keys[untouched].any()
    assert not values[untouched].any()
    if case != "shared":
        given = F.rms_norm(parts[1 if case == "values are keys" else 2], (DIM,), eps=EPS)
        torch.testing.assert_close(keys[[7, 2]].float(), turned(parts[1], norms[1])[[0, 2]], **bound)
        torch.testing.assert_close(values[[7, 2]].float(), given[[0, 2]], **bound)


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="the interpreter multiplies by numpy, which sums as it likes"
)
def test_a_head_has_the_same_bits_among_any_number_of_rows(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.attention.heads import project_heads
    from paceline.backends.cuda.kernels.products import matrix

    torch.manual_seed(3)
    count, most = HEADS + 2 * KV_HEADS, 128
    rows = torch.randn(most, HIDDEN, device=device).to(dtype)
    weight = (torch.randn(count * DIM, HIDDEN, device=device) / 8).to(dtype)
    norms = (torch.randn(DIM, device=device).to(dtype), torch.randn(DIM, device=device).to(dtype))
    angles = torch.arange(most + 5, device=device)[:, None] * torch.rand(DIM // 2, device=device)
    own = matrix.tile_heads(weight, DIM, matrix.Tiling(columns=64, step=64, splits=2))
    normed = matrix.Normed(rows, rows.float().square().view(most, 2, -1).sum(-1), HIDDEN, EPS)
    slot_mapping, rotation = torch.arange(most, device=device).int(), (angles.cos(), angles.sin())
    found = []
    for number in (1, 20, 64, most):
        query = torch.zeros(most, HEADS, DIM, dtype=dtype, device=device)
        keys, values = (torch.zeros(most, KV_HEADS, DIM, dtype=dtype, device=device) for _ in range(2))
        scratch = matrix.scratch_for([own], number, device)
        positions = slot_mapping[:number] + 5
        project_heads(
            normed, own, positions, slot_mapping[:number], rotation, norms, query, keys, values, scratch
        )
        found.append((query[0], keys[0], values[0]))
    for other in found[1:]:
        assert all(torch.equal(mine, its) for mine, its in zip(found[0], other, strict=True))


def test_queries_are_scaled_by_position(device: torch.device, dtype: torch.dtype) -> None:
    from paceline.backends.cuda.kernels.attention.heads import scale_queries

    torch.manual_seed(3)
    given = torch.randn(4, HEADS, DIM).to(dtype)
    factors, query = torch.rand(10) + 1, given.to(device, copy=True)
    scale_queries(query, factors.to(device), torch.tensor(POSITIONS).int().to(device))
    expected = (given[:3].float() * factors[POSITIONS][:, None, None]).to(dtype)
    assert torch.equal(query[:3].cpu(), expected)
    assert torch.equal(query[3].cpu(), given[3])
