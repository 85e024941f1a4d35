"""Costs: of data sheets compared with measured servers, and of this machine from a few of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest

from paceline.bench.run.engine_runner import Task
from paceline.bench.run.slices import Disturbances, alone
from paceline.bench.simulate.costs import Call, CostModel, MeasuredCosts, PassSize, fit, start_costs
from paceline.bench.simulate.hardware import RooflineCosts, find_gpu, find_model, model_size
from paceline.bench.simulate.measuring import PassMeter, TimedStep, measure_costs, watching
from paceline.bench.simulate.presets import GPUS, MODELS
from paceline.bench.simulate.world import (
    Acceptance,
    CountingTokenizer,
    SimulatedBackend,
    SimulatedDrafter,
    VirtualClock,
)
from paceline.control.controller import FixedController
from paceline.control.cost import StepCosts
from paceline.core.forward import ForwardBatch, ForwardOutput
from paceline.core.params import SamplingParams
from paceline.core.stats import StepStats
from paceline.core.trees import PLAIN, DraftPlan
from paceline.engine.admission import Limits
from paceline.errors import ConfigError
from tests.engines import new_engine

LLAMA_8B = RooflineCosts(GPUS["h200"], model_size(8.03e9))


def step_ms(costs: CostModel, requests: int, drafted: int = 0, context: int = 256) -> float:
    """Milliseconds of a step of `requests` requests, each with a chain of `drafted` tokens."""
    rows = requests * (1 + drafted)
    size = PassSize(rows, requests, rows, requests * context, rows * context)
    drafting = costs.draft_seconds(Call("head", requests, drafted, requests * drafted))
    return 1e3 * (costs.pass_seconds(size) + costs.overhead_seconds(size) + drafting)


@pytest.mark.parametrize(
    ("requests", "drafted", "measured"),
    [
        *((1, 0, 4.83), (4, 0, 4.93), (16, 0, 5.17), (64, 0, 5.97)),
        *((1, 3, 5.83), (16, 3, 6.30), (1, 5, 6.48), (16, 5, 6.88), (64, 5, 13.5)),
    ],
)
def test_an_8b_model_on_an_h200_is_priced_as_a_server_measured_it(requests, drafted, measured):
    """Measured with a well-known server: bf16, CUDA graphs, an EAGLE-3 head."""
    assert step_ms(LLAMA_8B, requests, drafted) == pytest.approx(measured, rel=0.05)


def test_missing_model_figures_are_the_usual_ones_for_its_size():
    model = model_size(8e9)
    assert model.kv_bytes_per_token == pytest.approx(131072, rel=0.1)  # llama 3.1 8B
    assert model.weight_bytes == 16e9
    assert model_size(8e9, bits=4).weight_bytes == 4e9
    assert model_size(8e9, layers=32).kv_bytes_per_token == 131072
    assert model_size(8e9, kv_bytes_per_token=7).kv_bytes_per_token == 7


def test_weights_that_do_not_fit_are_refused():
    assert 300_000 < RooflineCosts(GPUS["h100"], model_size(8e9)).kv_tokens() < 500_000
    with pytest.raises(ConfigError, match="weights take 140"):
        RooflineCosts(GPUS["a100"], model_size(70e9, draft_params=0)).kv_tokens()


def test_a_gpu_is_named_or_given_by_figures():
    assert find_gpu("h200", 4e12, None, None)[1].bandwidth == 4e12
    assert find_gpu("4xH100", None, None, None) == (4, GPUS["h100"])
    assert find_gpu(None, 1e12, 1e14, 1e10)[1].memory == 1e10
    for name in ("h2000", "x", "4x", "4xx", "four-h100"):
        with pytest.raises(ConfigError, match="h200, h100"):
            find_gpu(name, None, None, None)
    with pytest.raises(ConfigError, match="from 1 to 8, got 16"):
        find_gpu("16xh100", None, None, None)
    with pytest.raises(ConfigError, match="--flops is missing"):
        find_gpu(None, 1e12, None, 1e10)


def test_a_model_is_named_or_given_by_figures():
    given = find_model("Llama-3.1-8B", None, None, None, None, None)
    assert (given.params, given.kv_bytes_per_token) == (8.03e9, 131072)
    assert given.draft_params == pytest.approx(0.4e9, rel=0.05)  # an EAGLE-3 head, without its embedding
    assert find_model("llama-3.1-8b", None, 8, None, None, 0).weight_bytes == 8.03e9
    assert find_model(None, 3e9, None, None, None, None).params == 3e9
    with pytest.raises(ConfigError, match=r"is not known: did you mean 'llama-3.1-70b'\? Use one of llama"):
        find_model("llama-3.1-71b", None, None, None, None, None)
    with pytest.raises(ConfigError, match=r"'own' is not known\. Use one of llama"):
        find_model("own", None, None, None, None, None)
    with pytest.raises(ConfigError, match="--layers is part of --model"):
        find_model("llama-3.1-8b", None, None, 3, None, None)


def test_a_few_tokens_read_few_experts_and_many_read_all():
    model = MODELS["qwen3-30b-a3b"]
    assert model.read_bytes(1) == pytest.approx(2 * 3.3e9)
    assert 2 * 3.3e9 < model.read_bytes(4) < 4 * 2 * 3.3e9
    assert model.read_bytes(2048) == pytest.approx(model.weight_bytes)
    assert MODELS["qwen3-32b"].read_bytes(1) == MODELS["qwen3-32b"].weight_bytes


@pytest.mark.parametrize("name", MODELS)
def test_figures_of_every_model_fit_together(name):
    model = MODELS[name]
    assert 0 < model.draft_params < model.used_params <= model.params
    assert (model.routing < 1) == (model.active_params is not None)
    assert 1e4 < model.kv_bytes_per_token < 1e6


def test_several_gpus_divide_the_work_and_pay_for_communication():
    model = MODELS["llama-3.1-70b"]
    two, four = (RooflineCosts(GPUS["h100"], model, 0.0, count) for count in (2, 4))
    row, prompt = PassSize.chain(1), PassSize(2048, 1, 1, 0, 0)
    reading = model.weight_bytes / (0.85 * 3.35e12)
    for costs, count in ((two, 2), (four, 4)):
        communication = costs.pass_seconds(row) - reading / count
        assert communication == pytest.approx(2 * 80 * 10e-6, rel=0.05)  # latency of 160 all-reduces
    assert four.kv_tokens() > 3 * two.kv_tokens() > 0
    slow = RooflineCosts(GPUS["l40s"], model, 0.0, 4)  # over PCIe: 5 seconds of all-reduces per GB sent
    sent = 2 * 80 * 2 * (3 / 4) * 2048 * 8192 * 2 / (0.7 * 32e9)
    assert slow.pass_seconds(prompt) > sent > slow.pass_seconds(row)
    assert four.draft_seconds(Call("head", 1, 3, 3)) < two.draft_seconds(Call("head", 1, 3, 3))


def test_a_kv_head_is_not_split():
    """Latent attention has one, which every GPU keeps."""
    costs = RooflineCosts(GPUS["h200"], MODELS["deepseek-v3"], 0.0, num_gpus=8)
    read = costs.pass_seconds(PassSize(1, 1, 1, 100_000, 0)) - costs.pass_seconds(PassSize(1, 1, 1, 0, 0))
    assert read == pytest.approx(100_000 * 61 * 576 * 2 / (0.85 * 4.8e12))


def test_fitted_costs_are_not_negative():
    rng = np.random.default_rng(0)
    terms = rng.uniform(1, 9, (50, 3))
    assert fit(terms, terms @ [0.1, 0.0, 2.0]) == pytest.approx([0.1, 0.0, 2.0], abs=1e-9)
    assert min(fit(terms, 5.0 - 0.1 * terms[:, 0])) >= 0


def test_start_costs_are_the_costs_of_passes():
    costs = start_costs(LLAMA_8B, max_rows=512)
    alone_seconds = LLAMA_8B.pass_seconds(PassSize.chain(8, 1024))
    assert float(costs.seconds(8, 1024)) == pytest.approx(alone_seconds, rel=0.01)


TRUE = MeasuredCosts(
    verified=StepCosts([1, 8, 64], [0.004, 0.006, 0.03]),
    prompts=StepCosts([1, 64, 512], [0.004, 0.02, 0.15]),
    per_key=1e-7,
    per_context=2e-7,
    overhead=(0.0005, 0.0001),
    drafts={"head": (0.0002, 0.00001, 0.0003, 0.00002)},
)


class TimedBackend(SimulatedBackend):
    """Passes alone, without the overhead of a step."""

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        before = self._clock()
        output = super().forward(batch)
        rows, requests = batch.num_rows, batch.num_requests
        self._clock.advance(-TRUE.overhead_seconds(PassSize(rows, requests, 0, 0, 0)))
        assert self._clock() > before
        return output


def test_measured_passes_have_their_price():
    clock = VirtualClock()
    meter = PassMeter(TimedBackend(TRUE, clock, 512), 4096, clock)
    alone(meter.slices())
    found = meter.costs()
    for size in (PassSize.chain(1), PassSize.chain(8, 500), PassSize(512, 1, 1, 0, 131328)):
        assert found.pass_seconds(size) == pytest.approx(TRUE.pass_seconds(size), rel=0.03)


class Calm(Disturbances):
    """Nothing else runs here."""

    def waited(self) -> float:
        return 0.0

    def in_step(self, stats: StepStats, waited: float) -> float:
        return 0.0


def steps_of(plan: DraftPlan) -> list[TimedStep]:
    """Steps of a simulated engine, watched."""
    clock = VirtualClock()
    drafter = SimulatedDrafter("head", [Acceptance((0.7, 0.5, 0.3), (0.9, 0.6, 0.5))], TRUE, clock)
    engine = new_engine(
        SimulatedBackend(TRUE, clock, 512),
        CountingTokenizer(),
        Limits(vocab_size=4, max_model_len=256, max_num_seqs=16, max_num_batched_tokens=512),
        num_pages=512,
        enable_prefix_caching=False,
        controller=FixedController(plan),
        drafters={"head": drafter},
        clock=clock,
    )
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    tasks = [Task(str(number), "", [0] * (20 + 9 * number), params) for number in range(4)]
    watched: list[TimedStep] = []
    alone(watching(engine, tasks, Calm(), watched, clock))
    return watched


def test_costs_are_fitted_from_an_engines_steps():
    """Of a simulated one, whose costs are known."""
    watched = {"off": steps_of(PLAIN), "head": steps_of(DraftPlan("head", 3))}
    passes = MeasuredCosts(TRUE.verified, TRUE.prompts, TRUE.per_key, TRUE.per_context)
    found = measure_costs(passes, watched, ["head"])
    for requests, drafted in ((1, 0), (4, 3), (12, 0), (16, 3)):
        costs = found["head" if drafted else "off"]
        step = partial(step_ms, requests=requests, drafted=0, context=64)
        assert step(costs) == pytest.approx(step(TRUE), rel=0.03)
        call = Call("head", requests, drafted, requests * drafted)
        assert costs.draft_seconds(call) == pytest.approx(TRUE.draft_seconds(call), rel=0.05)


def test_steps_are_timed_at_several_concurrencies():
    seen: Sequence[int] = [step.stats.requests for step in steps_of(PLAIN)]
    assert set(seen) == {1, 4, 16}
