"""`paceline tune`: its result, with advice and the equivalent flags of other engines."""

from __future__ import annotations

import json
from dataclasses import asdict

from paceline.bench.report.result import Figure, Finding, Mark, Ranges, Result, Table
from paceline.bench.run.speculation import OFF
from paceline.bench.run.wording import shown, with_interval
from paceline.bench.tune.search import ENOUGH_PROMPTS, Config, Tuning
from paceline.draft.methods import METHODS
from paceline.models.heads.shipped import SHIPPED_HEAD

# SGLang's names of the methods that it has
SGLANG_NAMES = {
    "ngram": "NGRAM",
    "eagle": "EAGLE",
    "eagle3": "EAGLE3",
    "dflash": "DFLASH",
    "dspark": "DSPARK",
    "draft_model": "STANDALONE",
}
VLLM_METHODS = ("ngram", "suffix", "eagle", "eagle3", "dflash", "dspark", "medusa", "draft_model")


def tune_result(tuning: Tuning) -> Result:
    """All candidates, the fastest first, and the advice."""
    title = f"{tuning.model}: candidates on the prompts that choose"
    ordered = sorted(tuning.search, key=lambda row: -row.tokens_per_second)
    rows = [
        (
            row.method,
            f"{row.tokens_per_second:,.0f}",
            with_interval(row),
            "" if row.method == OFF else shown(row.mean_acceptance_length, ".2f"),
        )
        for row in ordered
    ]
    columns = ("speculative_config", "tok/s", "speedup (95 %)", "length")
    facts = {
        "model": tuning.model,
        "chosen": tuning.chosen,
        "proof": asdict(tuning.proof),
        "identical": tuning.identical,
        "rows": [asdict(row) for row in tuning.search],
    }
    changed = Finding(
        "A candidate changed tokens of plain decoding. This is a bug, please report it.", good=False
    )
    speeds = {row.method: row.tokens_per_second for row in ordered}
    marks = [Mark(method, f"{speed:,.0f}", method, speed, 0, speed) for method, speed in speeds.items()]
    return Result(
        title,
        [Table(title, columns, rows, text=("speculative_config",))],
        facts,
        findings=[] if tuning.identical else [changed],
        notes=advice(tuning),
        figures=[Figure("Throughput", [Ranges("output tokens per second", {"": marks})])],
        series=[OFF, *(method for method in speeds if method != OFF)],
    )


def vllm_flags(config: Config | str) -> str | None:
    """The equivalent flags of `vllm serve`; None if there are none."""
    if isinstance(config, str):
        return ""
    if config["method"] not in VLLM_METHODS or config.get("branching", 1) > 1:
        return None
    has_files = METHODS[config["method"]].argument is not None  # vLLM does not find our shipped head itself
    theirs = {**config, "model": _head(config)} if has_files else config
    return f"--speculative-config '{json.dumps(theirs)}'"


def _head(config: Config) -> str:
    """The folder of a head as other engines get it; HEAD stands for what `paceline export` writes."""
    given = config.get("model", SHIPPED_HEAD)
    return "HEAD" if given == SHIPPED_HEAD else str(given)


def sglang_flags(config: Config | str) -> str | None:
    """The equivalent flags of SGLang's server; None if there are none."""
    if isinstance(config, str):
        return ""
    name = SGLANG_NAMES.get(config["method"])
    if name is None:
        return None
    length, branching = config["num_speculative_tokens"], config.get("branching", 1)
    flags = [f"--speculative-algorithm {name}", f"--speculative-num-draft-tokens {length + 1}"]
    if config["method"] != "ngram":
        flags += [
            f"--speculative-draft-model-path {_head(config)}",
            f"--speculative-num-steps {length if branching == 1 else -(-length // branching)}",
            f"--speculative-eagle-topk {branching}",
        ]
    return " ".join(flags)


def advice(tuning: Tuning) -> list[str]:
    """What to use and what to expect from it, in lines."""
    proof, chosen = tuning.proof, tuning.chosen
    interval = proof.speedup_interval
    between = "" if interval is None else f", 95 % confidence {interval[0]:.2f} to {interval[1]:.2f}"
    lines = [
        f"best of {len(tuning.search) - 1} by tokens per second: {json.dumps(tuning.best)}",
        f"expected gain, on {proof.prompts} prompts that did not choose it: {proof.speedup_vs_off or 0:.2f} "
        f"times as fast as off{between}",
    ]
    prompts = tuning.search[0].prompts + proof.prompts
    if prompts < ENOUGH_PROMPTS:
        lines.append(
            f"{prompts} prompts say little, and others may choose otherwise: give {ENOUGH_PROMPTS} or more."
        )
    if chosen == OFF:
        return [
            *lines,
            f"No gain with {', '.join(tuning.tried)}: leave drafting off. "
            f"paceline serve {tuning.model} --draft off",
        ]
    if interval is not None and interval[0] < 1:
        lines.append("That it gains at all is not sure: measure with more prompts or rounds.")
    lines.append(f"paceline: paceline serve {tuning.model} --speculative-config '{json.dumps(chosen)}'")
    for engine, flags in (("vLLM", vllm_flags(chosen)), ("SGLang", sglang_flags(chosen))):
        lines.append(f"{engine}: {'it has no such drafts' if flags is None else flags}")
    return [
        *lines,
        "What is best here need not be best there: measure other servers by `paceline bench serve URL`.",
    ]
