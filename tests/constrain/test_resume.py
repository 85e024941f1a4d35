"""A constrained request that was cut goes on in the same grammar state, wherever it was cut."""

from __future__ import annotations

import pytest

from tests.constrain.engines import PLANS, make_engine, requests, result, served
from tests.toy import drain


@pytest.mark.parametrize("plan", ["off", "grammar", "suffix tree"])
def test_a_constrained_output_continues_where_it_was_cut(plan: str) -> None:
    wanted = list(requests(PLANS[plan]))
    whole = served(make_engine(), wanted)
    engine, pairs = make_engine(), []
    for number, ((ids, params), request) in enumerate(zip(wanted, whole, strict=True)):
        if request.error is not None:
            continue
        cut = number * 5 % len(request.output_token_ids)
        (resumed,) = engine.add_request(ids, params, resume={0: request.output_token_ids[:cut]})
        pairs.append((resumed, request, cut))
    drain(engine)
    assert len(pairs) > 10
    for resumed, request, cut in pairs:
        resumed.logprobs[:0] = request.logprobs[:cut]  # those that the first engine gave
        assert result(resumed) == result(request)
