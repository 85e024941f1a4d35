"""What a server adds to its engines is found again from its answers."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from benchmarks.server.fleet_costs import probes, served_world
from paceline.bench.simulate.costs import Contention, ServerCosts
from paceline.bench.simulate.fleet import run_fleet
from paceline.bench.simulate.run import Method
from tests.bench.simulate.test_fleet import world


def test_the_costs_of_a_server_are_found_from_its_answers() -> None:
    """A simulated server takes the place of the real one."""
    here, sent = replace(world(), max_num_batched_tokens=512), probes(2, repeats=1)
    server = ServerCosts(request=0.015, prompt_token=2e-5, step=0.001, token=0.0005, row=3e-5)
    true = replace(here, server=server, contention=Contention(1.1, 1.25))
    answers = []
    for probe in sent:
        before = probe.requests if probe.kind.cached else []
        later = [replace(request, due=60.0 * probe.kind.cached) for request in probe.requests]
        run = run_fleet(true, Method("off"), 2, "prefix", [*before, *later])
        answers.append(run.answers[len(before) :])
    found = served_world(here, 2, sent, answers)
    assert asdict(found.contention) == pytest.approx(asdict(true.contention), rel=0.02)  # one ends alone
    assert asdict(found.server) == pytest.approx(asdict(server), rel=0.05)
