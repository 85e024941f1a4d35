"""Simulated machines: by the figures of a data sheet, or by costs measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.bench.loading import bench_config
from paceline.bench.run.engine_runner import Task
from paceline.bench.run.slices import Disturbances, alone
from paceline.bench.run.speculation import OFF
from paceline.bench.simulate.costs import PassSize
from paceline.bench.simulate.hardware import STEP_OVERHEAD, RooflineCosts, find_gpu, find_model
from paceline.bench.simulate.measuring import PROMPT, STEPS, PassMeter, TimedStep, measure_costs, watching
from paceline.bench.simulate.run import Length, Method, World
from paceline.bench.simulate.sources import CHAIN, Drafters
from paceline.bench.traffic.workloads import load_workload
from paceline.build import build_engine, load_model
from paceline.config import USUAL_ROWS_PER_PASS, SchedulerOptions
from paceline.core.params import SamplingParams
from paceline.draft.methods import AUTO
from paceline.draft.speculative_config import parse_speculative_config
from paceline.errors import ConfigError
from paceline.options import check_integer, check_number
from paceline.terminal.flags import Options

GPU_ROWS = 2048  # rows per pass
USUAL_PROMPTS = "chat"  # workload to measure costs with, if none is named


def given_world(
    machine: Options, traffic: Options, drafters: Drafters, methods: Sequence[Method], chances: bool
) -> tuple[World, list[Length]]:
    """A machine by data sheet, and the lengths of its requests."""
    if traffic["workload"] is not None:
        raise ConfigError("--data needs a MODEL, whose tokenizer counts: give --input-tokens instead.")
    if traffic["threads"] is not None:
        raise ConfigError("--threads is of a MODEL that is measured here: leave it out with a --gpu.")
    overhead = STEP_OVERHEAD if machine["overhead"] is None else machine["overhead"]
    num_gpus, gpu = find_gpu(machine["gpu"], machine["bandwidth"], machine["flops"], machine["memory"])
    size = find_model(
        machine["preset"],
        machine["params"],
        machine["bits"],
        machine["layers"],
        machine["kv_bytes_per_token"],
        machine["draft_params"],
    )
    overhead = check_number(ConfigError, "--overhead", overhead, 0, 1000)
    costs = RooflineCosts(gpu, size, overhead, num_gpus)
    world = World(
        costs={method.label: costs for method in methods},
        drafters=drafters,
        max_num_batched_tokens=_max_rows(traffic, GPU_ROWS),
        kv_tokens=costs.kv_tokens(),
        server_kv_tokens=costs.kv_tokens(),
        num_gpus=num_gpus,
        tells_chances=chances,
    )
    return world, [_length(traffic)]


def measured_world(
    name: str,
    draft_cost: float,
    traffic: Options,
    drafters: Drafters,
    methods: Sequence[Method],
    chances: bool,
) -> tuple[World, list[Length]]:
    """This machine with measured costs, and the lengths of its requests. A drafter known only by its
    acceptance costs `draft_cost` one-row passes per level."""
    check_number(ConfigError, "draft_cost", draft_cost, 0.0, 1000.0)
    rows = _max_rows(traffic, USUAL_ROWS_PER_PASS)
    length = _length(traffic)
    loaded = [drafter for drafter in drafters if drafter != CHAIN]
    for drafter in loaded:
        parse_speculative_config(drafter)  # report a drafter that cannot be loaded before the model is
    workload = load_workload(traffic["workload"] or USUAL_PROMPTS)
    config_of = partial(bench_config, name, "auto", traffic["threads"], SchedulerOptions().max_num_seqs)
    model = load_model(config_of(OFF))
    prompts = [(prompt.token_ids(model.tokenizer), prompt.max_tokens) for prompt in workload.prompts]
    params = SamplingParams(temperature=0, max_tokens=PROMPT + 2 * STEPS, ignore_eos=True)
    tasks = [Task(str(number), "", ids, params) for number, (ids, _) in enumerate(prompts)]
    everyone = ",".join([AUTO, *loaded])
    watched: dict[str, list[TimedStep]] = {
        config: [] for config in (OFF, *loaded, *([everyone] if loaded else []))
    }
    for config, steps in watched.items():
        engine = build_engine(config_of(config), model).engine
        kv_tokens = engine.kv.pages.num_pages * engine.kv.page_size
        alone(watching(engine, tasks, Disturbances(), steps))
    meter = PassMeter(model.backend, model.config.max_position)
    alone(meter.slices())
    passes = meter.costs()
    costs = measure_costs(passes, watched, loaded)
    chain = (0.0, 0.0, draft_cost * passes.pass_seconds(PassSize.chain(1)), 0.0)
    priced = {config: replace(own, drafts={**own.drafts, CHAIN: chain}) for config, own in costs.items()}
    loads = {method.label: everyone if method.label == AUTO else method.drafter for method in methods}
    world = World(
        costs={label: priced[config if config in priced else OFF] for label, config in loads.items()},
        drafters=drafters,
        max_num_batched_tokens=rows,
        server_kv_tokens=kv_tokens,
        max_num_seqs=SchedulerOptions().max_num_seqs,
        max_model_len=engine.limits.max_model_len,
        tells_chances=chances,
    )
    if traffic["workload"] is None:
        return world, [length]
    return world, [Length(len(ids), tokens) for ids, tokens in prompts]


def _length(traffic: Options) -> Length:
    return Length(
        check_integer(ConfigError, "--input-tokens", traffic["input_tokens"], 1, 1 << 20),
        check_integer(ConfigError, "--output-tokens", traffic["output_tokens"], 2, 1 << 20),
    )


def _max_rows(traffic: Options, usual: int) -> int:
    asked = traffic["max_num_batched_tokens"]
    rows = usual if asked is None else asked
    return check_integer(ConfigError, "--max-num-batched-tokens", rows, 2, 1 << 20)
