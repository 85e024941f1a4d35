"""Requests generated from the OpenAPI document: none gives a 500, and every answer is as documented.

More of them against any server: `python -m tests.serve.test_schemathesis URL REQUESTS`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import load_all_checks
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serve.running import serving
from tests.toy import toy_engine

# what a document cannot say (ids within the vocabulary, prompts that fit) is refused with reason
EXCLUDED = [positive_data_acceptance]


def check_operations(url: str, requests: int) -> Counter[int]:
    """Number of answers by status, for about this many requests, half of them invalid by the document."""
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    with_body = [operation for operation in operations if operation.body]
    statuses: Counter[int] = Counter()
    for operation in operations:
        if operation in with_body:
            each = requests // (2 * len(with_body))
            valid = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
            _check(valid.map(_of_any_model), each, statuses)
            _check(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), each, statuses)
        else:  # hardly anything can be varied
            _check(operation.as_strategy(), 3, statuses)
    return statuses


def _of_any_model(case: schemathesis.Case) -> schemathesis.Case:
    """The case without a model: a generated name is hardly ever served, and all answers would be 404."""
    if isinstance(case.body, dict):
        case.body.pop("model", None)
    return case


def _check(cases: Any, examples: int, statuses: Counter[int]) -> None:
    @hypothesis.settings(
        max_examples=examples,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(case=cases)
    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, excluded_checks=EXCLUDED)

    check()


@pytest.mark.fuzz
def test_no_generated_request_breaks_the_server() -> None:
    engine = toy_engine(max_model_len=1024, num_pages=2000)  # made-up requests ask for as much as there is
    with serving(engine) as client:
        statuses = check_operations(f"http://127.0.0.1:{client.port}", 96)
    assert sum(statuses.values()) > 80
    assert statuses[200] > 12
    assert statuses[400] > 20
    assert max(statuses) < 500


if __name__ == "__main__":
    print(dict(check_operations(sys.argv[1], int(sys.argv[2]))))
