"""`paceline train eagle3|p-eagle|dspark|dflash|dflash2|jetspec|medusa|answers|plan`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.terminal.flags import PROMPT_FILE, Group, Options, integers, with_flags
from paceline.terminal.help import App
from paceline.train.flags import ANSWERS, BLOCK, DFLASH2, DSPARK, EAGLE3, MEDUSA, P_EAGLE, SEED

if TYPE_CHECKING:
    from paceline.train.data.make_answers import AnswerOptions

app = App(help="Train a draft head on the target's own answers.", no_args_is_help=True)

Model = Annotated[str, typer.Argument(help="The target: an alias, a .gguf file, a folder or a hub id.")]
Data = Annotated[
    list[Path] | None,
    typer.Option(*PROMPT_FILE, help="Prompts (chats, ShareGPT, OpenAI logs) or answers. May be repeated."),
]
Exclude = Annotated[
    list[Path] | None,
    typer.Option(
        help="Prompts that are measured with: rows of --data that have 12 words in a row of one of them are "
        "left out. May be repeated."
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda if available.")]
Out = Annotated[Path, typer.Option(help="Folder of the head; an interrupted run is resumed there.")]
InitFrom = Annotated[
    str | None,
    typer.Option(help="Train this head further, instead of a new one: its folder, or shipped."),
]
Evaluate = Annotated[int, typer.Option(help="Number of held-out prompts to measure the head with.")]

SELF_WRITTEN = 2000  # prompts, if no file is given


@app.command("answers")
@with_flags(answering=ANSWERS, seed=SEED)
def answers_command(
    answering: Options,
    seed: Options,
    out: Annotated[Path, typer.Option(help="File of answers; an existing one is continued.")],
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    exclude: Exclude = None,
    device: Device = "auto",
) -> None:
    """Let the target answer prompts, for `train eagle3` or `train medusa` here or on another machine."""
    options = _answer_options(answering, seed, has_files=bool(data))
    from paceline.models.registry import resolve
    from paceline.train.job import answer, chosen_device

    answer(resolve(model), data or [], out, options, chosen_device(device), exclude=exclude or [])


@dataclass(frozen=True)
class Recipe:
    """How `paceline train NAME` trains one kind of head. Modules are imported when it runs."""

    flags: Group
    options: str  # class in train/options.py
    objective: str  # MODULE:CLASS
    method: str  # of the heads that --init-from takes
    summary: str
    load: str = "paceline.models.heads.checkpoint:load_head"  # MODULE:FUNCTION that reads such a head


_EAGLE3 = "paceline.train.objectives.eagle3_objective:Eagle3Objective"
_BLOCK = "paceline.train.objectives.block_objective:BlockObjective"
_MEDUSA = "paceline.train.objectives.medusa:MedusaObjective"
RECIPES = {
    "eagle3": Recipe(
        EAGLE3,
        "Eagle3Options",
        _EAGLE3,
        "eagle3",
        "Train an EAGLE-3 head: the target answers the prompts, the head learns to guess the answers.",
    ),
    "p-eagle": Recipe(
        P_EAGLE,
        "PEagleOptions",
        _EAGLE3,
        "eagle3",
        "Train a P-EAGLE head: an EAGLE-3 head of several layers that guesses a draft in one pass.",
    ),
    "dspark": Recipe(
        DSPARK,
        "DSparkOptions",
        _BLOCK,
        "dspark",
        "Train a DSpark head: one pass guesses a block; each guess depends on the token before.",
    ),
    "dflash": Recipe(
        BLOCK,
        "BlockOptions",
        _BLOCK,
        "dflash",
        "Train a DFlash head: one pass guesses a block, whose slots see each other in both directions.",
    ),
    "dflash2": Recipe(
        DFLASH2,
        "DFlash2Options",
        _BLOCK,
        "dflash",
        "Train a DFlash2 head: DFlash with convolutions in the block, and a selector by the token before.",
    ),
    "jetspec": Recipe(
        BLOCK,
        "JetSpecOptions",
        _BLOCK,
        "dflash",
        "Train a JetSpec head: a DFlash head whose slots see only those before; for trees.",
    ),
    "medusa": Recipe(
        MEDUSA,
        "MedusaOptions",
        _MEDUSA,
        "medusa",
        "Train Medusa heads: the target answers the prompts, each head learns to guess a token further "
        "ahead.",
        "paceline.models.heads.medusa:load_medusa",
    ),
}


def _add_command(name: str, recipe: Recipe) -> None:
    @app.command(name, help=recipe.summary)
    @with_flags(answering=ANSWERS, training=recipe.flags, seed=SEED)
    def train_command(
        answering: Options,
        training: Options,
        seed: Options,
        out: Out,
        model: Model = DEFAULT_MODEL,
        data: Data = None,
        exclude: Exclude = None,
        init_from: InitFrom = None,
        device: Device = "auto",
        evaluate: Evaluate = 40,
    ) -> None:
        from paceline.train.job import Job, train

        options = _named(f"paceline.train.options:{recipe.options}")(**training, **seed)
        first = None
        if init_from is not None:
            first = _named(recipe.load)(_init_from(init_from, recipe.method, model))
            _check_shape(options, first.config)
        answer_options = _answer_options(answering, seed, has_files=bool(data))
        job = Job(model, data or [], out, device, evaluate, answer_options, exclude or [])
        objective = _named(recipe.objective)
        train(job, options, lambda target, examples, name: objective(target, examples, options, name, first))


for _name, _recipe in RECIPES.items():
    _add_command(_name, _recipe)


def _named(target: str) -> Any:
    """What a name MODULE:ATTRIBUTE refers to."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


@app.command("plan")
@with_flags(seed=SEED)
def plan_command(
    seed: Options,
    data: Annotated[
        list[Path],
        typer.Option(*PROMPT_FILE, help="Answers, as `paceline train answers` writes them. May be repeated."),
    ],
    model: Model = DEFAULT_MODEL,
    method: Annotated[str, typer.Option(help="Kind of head: dspark, or eagle3 of one layer.")] = "dspark",
    layers: Annotated[
        str | None, typer.Option(help="Sizes of heads to try, in layers. Default: 1,2,5 (eagle3: 1).")
    ] = None,
    steps: Annotated[str, typer.Option(help="Optimizer steps of the pilots of each size.")] = "100,200,400",
    epochs: Annotated[str, typer.Option(help="Passes over all answers to plan for.")] = "1,3,10",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once that the head is to serve.")] = 1,
    batch_tokens: Annotated[int, typer.Option(min=16, help="Tokens per optimizer step, at most.")] = 4096,
    draft_vocab_size: Annotated[
        str, typer.Option(help="Numbers of tokens that a head can predict, to choose from.")
    ] = "4096,8192,16384",
    max_length: Annotated[int, typer.Option(min=4, help="Tokens per example; longer ones in parts.")] = 1024,
    device: Device = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Predict what a head would gain here, and what its training would take, from short pilots."""
    from paceline.train.plan.job import FLAGS, PlanJob, plan
    from paceline.train.plan.pilots import PilotPlan

    if method not in FLAGS:
        raise ConfigError(f"--method must be one of {', '.join(FLAGS)}, got {method!r}.")
    recipe, one_layer = RECIPES[method], method == "eagle3"
    sizes = integers("--layers", layers or ("1" if one_layer else "1,2,5"))
    if one_layer and set(sizes) != {1}:
        raise ConfigError(f"An EAGLE-3 head has one layer: leave out --layers {layers}.")
    vocabularies = sorted(integers("--draft-vocab-size", draft_vocab_size))
    same = {"batch_tokens": batch_tokens, "draft_vocab_size": vocabularies[-1], "max_length": max_length}
    make = _named(f"paceline.train.options:{recipe.options}")
    options = {size: make(**same, **seed, **({} if one_layer else {"layers": size})) for size in sizes}
    pilots = PilotPlan(options, integers("--steps", steps), vocabularies, _named(recipe.objective))
    if len(set(pilots.steps)) < 2:
        raise ConfigError(f"--steps needs two numbers or more, such as 100,200,400; got {steps!r}.")
    plan(PlanJob(method, model, data, pilots, integers("--epochs", epochs), concurrency, device, json_file))


def _check_shape(options: Any, config: Any) -> None:
    """ConfigError if options ask for another shape than the head that is trained further can have."""
    from paceline.train.objectives.new_head import WIDENED
    from paceline.train.options import Eagle3Options

    can_grow = WIDENED if isinstance(options, Eagle3Options) else ()
    shape = {name: getattr(config, name, None) for name in ("draft_vocab_size", "intermediate_size")}
    shape["layers"] = config.num_layers
    block = getattr(config, "block", None)  # of a parallel head
    if block is not None:
        shape |= {"layers": len(block.layers), "block_size": block.size, "markov_rank": block.markov_rank}
    for field in fields(options):
        asked, has = getattr(options, field.name), shape.get(field.name)
        if has is None or asked in (field.default, has) or (field.name in can_grow and asked > has):
            continue
        flag = f"--{field.name.replace('_', '-')}"
        larger = ", or give a larger one" if field.name in can_grow else ""
        raise ConfigError(
            f"{flag} {asked}: the head of --init-from has {has} and keeps it. Leave out {flag}{larger}."
        )


def _init_from(name: str, method: str, model: str) -> Path:
    """The folder or file of the head to begin with."""
    from paceline.models.heads.fingerprint import target_fingerprint
    from paceline.models.heads.registry import resolve_head
    from paceline.models.registry import load_checkpoint, resolve

    return resolve_head(name, method, target_fingerprint(load_checkpoint(resolve(model))))


def _answer_options(answering: Options, seed: Options, has_files: bool) -> AnswerOptions:
    from paceline.train.data.make_answers import AnswerOptions

    self_written = answering["self_written"]
    if self_written is None:
        self_written = 0 if has_files else SELF_WRITTEN
    try:
        temperatures = tuple(float(part) for part in answering["temperatures"].split(","))
    except ValueError:
        raise ConfigError(
            f"--temperatures must be numbers with commas between, such as 0,0.8; got "
            f"{answering['temperatures']!r}."
        ) from None
    return AnswerOptions(**{**answering, "temperatures": temperatures, "self_written": self_written}, **seed)
