"""`paceline train eagle3|p-eagle|dspark|dflash|dflash2|jetspec|medusa|answers|plan`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.config import DEFAULT_MODEL
from paceline.errors import ConfigError
from paceline.terminal.flags import PROMPT_FILE, Flag, Group, Options, by_topic, having, integers, with_flags
from paceline.terminal.help import App

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

ANSWERS: Group = (
    Flag("temperatures", str, "0,0.8", "Sampling temperatures; each prompt is answered once at each."),
    Flag("max_prompt_tokens", int, 512, "Longer prompts are skipped."),
    Flag("max_tokens", int, 384, "Maximum tokens per answer."),
    Flag(
        "self_written",
        int | None,
        None,
        "Number of prompts that the model writes itself. Default: 2000 without --data, else 0.",
    ),
)
SEED: Group = (Flag("seed", int, 0, "The same seed gives the same answers and weights."),)
TRAINING: Group = (
    Flag("epochs", int, 3, "Passes over all answers."),
    Flag("max_steps", int | None, None, "Number of optimizer steps, instead of epochs."),
    Flag("max_epochs", int | None, None, "With --minutes: passes over all answers, at most."),
    Flag(
        "minutes",
        float | None,
        None,
        "Minutes for the whole command, instead of epochs: a third at most for answering, then training, and "
        "15 % at the end for measuring.",
    ),
    Flag("step_decay", float, 0.8, "Loss weight of each drafted token, relative to the one before."),
    Flag(
        "loss",
        str,
        "kl",
        "Loss: kl; ce, the cross-entropy with the answered token (DFlash's); lk, which adds the overlap of "
        "distributions, for temperatures around 1; or l1, DSpark's.",
    ),
    Flag("draft_vocab_size", int, 8192, "Tokens that the head can predict: the most frequent ones."),
    Flag(
        "batch_tokens",
        int | None,
        None,
        "Tokens per step, at most. Default: 512 to 8192, by the speed of a first step.",
    ),
    Flag(
        "weights",
        str,
        "",
        "How often an epoch has the examples of a segment, such as chat=2,code=0.5. Others: once.",
    ),
    Flag("max_length", int, 1024, "Tokens per example; longer ones are trained on in parts that overlap."),
    Flag("learning_rate", float, 5e-4, "Maximum learning rate, after the warm-up."),
    Flag("warmup_steps", int, 100, "Steps until the maximum learning rate."),
    Flag("clip", float, 1.0, "Maximum norm of the gradient."),
    Flag("held_out", float, 0.02, "Fraction of the prompts held out for evaluation."),
    Flag(
        "average",
        float,
        0.0,
        "Write an exponential moving average of the weights with this decay per step. 0: the last weights.",
    ),
    Flag(
        "checks",
        int,
        8,
        "How often acceptance on held-out answers is measured; the weights that accept most are written. 0: "
        "the last ones.",
    ),
    Flag(
        "round_weights",
        bool,
        False,
        "Round matrices to 4 bits in the second half of training, for a head that is served so.",
        "--round-weights/--no-round-weights",
    ),
    Flag(
        "keep_states",
        float,
        0.0,
        "GB of memory for the target's states, which later epochs then need not compute again.",
    ),
    Flag("checkpoint_every", int, 500, "Steps between two checkpoints; after 5 minutes in any case."),
)
ANSWERS = by_topic(ANSWERS, {"Answers": "temperatures max_prompt_tokens max_tokens self_written"})
TRAINING = by_topic(
    TRAINING,
    {
        "Optimizer": "batch_tokens max_length weights learning_rate warmup_steps clip average held_out "
        "checks round_weights keep_states checkpoint_every",
        "Loss": "step_decay loss",
    },
)
EAGLE3: Group = (
    *TRAINING,
    Flag("unroll", int, 5, "Number of drafted tokens per position in training."),
    Flag("intermediate_size", int | None, None, "Size of the head's MLP. Default: the target's."),
    Flag("fc_norm", bool, True, "EAGLE-3.1: one norm per feature.", "--fc-norm/--no-fc-norm"),
    Flag(
        "norm_output",
        bool,
        True,
        "EAGLE-3.1: feed the normalized state back.",
        "--norm-output/--no-norm-output",
    ),
)
P_EAGLE: Group = (
    *(flag for flag in EAGLE3 if flag.name != "norm_output"),
    Flag("layers", int, 4, "Layers of the head."),
)
MEDUSA: Group = (
    *having(TRAINING, learning_rate=1e-3),
    Flag("heads", int, 5, "Number of heads; each predicts one token further ahead."),
    Flag("layers", int, 1, "Residual blocks per head."),
)
BLOCK: Group = (
    *having(TRAINING, step_decay=0.78, average=0.999),
    Flag("layers", int, 5, "Layers of the head."),
    Flag("block_size", int, 8, "Slots of a block, the last known token included."),
    Flag("features", int, 5, "Hidden states of the target that the head reads."),
    Flag("anchors", float, 0.25, "Blocks in training per answered token."),
    Flag(
        "weighting",
        str,
        "decay",
        "Loss weights of drafted tokens: decay, by --step-decay; d-pace, by the head's own chances.",
    ),
    Flag("intermediate_size", int | None, None, "Size of the head's MLPs. Default: the target's."),
    Flag("fc_norm", bool, True, "One norm per feature, as in EAGLE-3.1.", "--fc-norm/--no-fc-norm"),
)
BLOCK = by_topic(
    BLOCK,
    {
        "Head": "draft_vocab_size layers block_size features intermediate_size fc_norm anchors",
        "Loss": "weighting",
    },
)
DFLASH2: Group = (
    *having(BLOCK, loss="ce"),
    *by_topic(
        (
            Flag("convolution_group", int, 16, "Channels that share a correction of the convolutions."),
            Flag("selector_rank", int, 256, "Rank of the selector."),
            Flag("selector_candidates", int, 16, "Best guesses of a slot that the selector chooses among."),
        ),
        {"Head": "convolution_group selector_rank selector_candidates"},
    ),
)
DSPARK: Group = (
    *having(BLOCK, loss="l1", block_size=7),
    *by_topic((Flag("markov_rank", int, 256, "Rank of the Markov head."),), {"Head": "markov_rank"}),
)
EAGLE3 = by_topic(EAGLE3, {"Head": "draft_vocab_size unroll intermediate_size fc_norm norm_output"})
P_EAGLE = by_topic(P_EAGLE, {"Head": "draft_vocab_size layers unroll intermediate_size fc_norm"})
MEDUSA = by_topic(MEDUSA, {"Head": "draft_vocab_size heads layers"})


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
