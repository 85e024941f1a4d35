"""What travels between ingress and replicas arrives as it was sent."""

from __future__ import annotations

import json

from paceline.core.params import SamplingParams
from paceline.core.structured_outputs import StructuredOutputsParams
from paceline.scale.remote.wire import RemoteRequest, decode_request, encode_request


def test_requests_survive_json() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "string"}}}
    structure = StructuredOutputsParams(json=schema)
    params = SamplingParams(
        n=2,
        temperature=0.1 + 0.2,
        seed=2**64 - 1,
        logit_bias={7: -100, 12: 0.5},
        allowed_token_ids=[1, 2],
        stop=["\ud800", "\u00e9"],  # half of a surrogate pair is a text too
        speculative={"method": "ngram", "num_speculative_tokens": 3},
        structured_outputs=structure,
    )
    resume = {1: [5, 6], 0: []}
    for request in (
        RemoteRequest("k-1", [1, 2, 3], params, structure, True, "segment", "salt", "sql", resume),
        RemoteRequest("k-2", [1], SamplingParams(seed=0), None, False, "", "", "", None),
    ):
        kind, content = json.loads(json.dumps(encode_request(request)))
        arrived = decode_request(content)
        assert kind == "request"
        assert arrived == request
        assert repr(arrived) == repr(request)  # also the order of a schema's properties, which is its meaning
