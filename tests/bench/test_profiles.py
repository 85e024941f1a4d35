"""Arrival profiles: fixed concurrency, Poisson, or a trace; and the format of a trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from paceline.bench.run.engine_runner import EngineRunner, Task
from paceline.bench.traffic.profiles import Profile, closed, poisson, replay
from paceline.core.params import SamplingParams
from paceline.errors import ConfigError
from tests.toy import toy_engine

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:05.9799600,110,0
"""


def tasks(count: int) -> list[Task]:
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    return [Task(str(i), "s", [5 + i, 6], params) for i in range(count)]


def test_poisson_arrivals_depend_on_the_seed_and_have_the_rate() -> None:
    profile = poisson(4.0, seed=1, num_requests=4000)
    assert profile == poisson(4.0, seed=1, num_requests=4000)
    assert profile.due != poisson(4.0, seed=2, num_requests=4000).due
    gaps = [after - before for before, after in pairwise((0.0, *profile.due))]
    assert min(gaps) > 0
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.1)
    # the standard deviation of exponential gaps equals their mean
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(1 / 4, rel=0.1)
    assert (profile.label, profile.concurrency) == ("4/s", None)


def test_a_trace_gives_arrivals_and_lengths_from_dates_or_seconds(tmp_path: Path) -> None:
    (tmp_path / "azure.csv").write_text(AZURE)
    profile = replay(tmp_path / "azure.csv", time_scale=0.5)
    assert profile.label == "trace azure"
    assert profile.due == pytest.approx((0.0, 0.026, 1.0), abs=1e-6)
    assert profile.lengths == (10, 8, 1)  # no answer is shorter than a token
    (tmp_path / "plain.csv").write_text("TIMESTAMP\n7.5\n8\n")
    plain = replay(tmp_path / "plain.csv")
    assert (plain.due, plain.lengths) == ((0.0, 0.5), ())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("time\n1\n", "has no column TIMESTAMP"),
        ("TIMESTAMP\n", "has no column TIMESTAMP"),
        ("TIMESTAMP\n1\nsoon\n", "line 3: 'soon' is neither seconds nor a date"),
        ("TIMESTAMP\n2\n1\n", "not in order"),
        ("TIMESTAMP,GeneratedTokens\n1,many\n", "line 2: GeneratedTokens must be a count"),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        replay(tmp_path / "trace.csv")


def test_a_trace_with_too_few_arrivals_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"has 2 arrivals, .* chat 3 requests\. Add --limit 2"):
        Profile("trace t", None, (0.0, 1.0)).check_room(3, "chat")
    closed(1).check_room(1000, "chat")
    for rate in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match="--rate must be"):
            poisson(rate, 0, 1)


def test_a_closed_profile_bounds_the_concurrency(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = toy_engine(enable_prefix_caching=False)
    at_once: list[int] = []
    running: set[str] = set()
    add, step = engine.add_request, engine.step

    def counted_add(*arguments: Any, **options: Any) -> Any:
        requests = add(*arguments, **options)
        running.add(requests[0].request_id)
        return requests

    def counted_step() -> Any:
        at_once.append(len(running))
        deltas = step()
        running.difference_update(delta.request.request_id for delta in deltas if delta.request.finished)
        return deltas

    monkeypatch.setattr(engine, "add_request", counted_add)
    monkeypatch.setattr(engine, "step", counted_step)
    turn = EngineRunner(engine).run(tasks(5), closed(2))
    assert [answer.num_tokens for answer in turn.answers] == [5] * 5
    assert max(at_once) == 2
    assert at_once[:-5] == [2] * (len(at_once) - 5), "who ends makes room at once; only the fifth is alone"
    alone = EngineRunner(toy_engine(enable_prefix_caching=False)).run(tasks(5), closed(1))
    assert all(one.same_as(other) for one, other in zip(turn.answers, alone.answers, strict=True))


def test_an_open_profile_counts_from_due_times_and_limits_answers() -> None:
    profile = Profile("trace t", None, (0.0, 0.0, 0.002), (2, 9, 1))
    turn = EngineRunner(toy_engine(enable_prefix_caching=False)).run(tasks(3), profile)
    assert [answer.num_tokens for answer in turn.answers] == [2, 5, 1]
    assert all(0 < answer.ttft <= answer.e2e_seconds <= turn.seconds for answer in turn.answers)
    assert turn.seconds >= 0.002
    assert [len(answer.times) for answer in turn.answers] == [2, 5, 1]
    assert turn.answers[2].tpot is None
