"""The `paceline` command. Each subcommand imports the package that implements it when it runs."""

from __future__ import annotations

import errno
import importlib
import json
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from paceline import __version__
from paceline.bench.simulate.command import simulate_command
from paceline.config import DEFAULT_MODEL
from paceline.errors import PacelineError
from paceline.extras import needs_extra
from paceline.machine import force_isa
from paceline.terminal.config_file import ConfigFile
from paceline.terminal.flag_groups import ENGINE, LEARN, SAMPLING, SCALE, SEED, SERVER, STRUCTURE
from paceline.terminal.flags import Options, by_topic, having, with_flags, without
from paceline.terminal.help import App

app = App(
    help="Run and serve LLMs with exact speculative decoding: the same seed gives the same bytes.",
    no_args_is_help=True,
)

MIN_ADDRESS_SPACE = 1 << 30  # bytes; no model runs in less
MEMORY_REMEDY = (
    "Use a smaller model, lower --kv-cache-memory-bytes, --max-model-len or --threads, or raise the memory "
    "limit of this process (`ulimit -v`)."
)
MAKE_ROOM = "Make room on the disk, or give another folder (PACELINE_HOME names that of models and kernels)."
DISK_REMEDIES = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EROFS: "Give a folder that can be written to.",
    errno.EACCES: "Check its permissions, or give another file or folder.",
}
ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

Model = Annotated[str, typer.Argument(help="An alias, a .gguf file, a folder of safetensors or a hub id.")]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        help="An alias, a .gguf file, a folder of safetensors or a hub id.", show_default=DEFAULT_MODEL
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
System = Annotated[str | None, typer.Option("--system", help="System message of the chat.")]


def main(commands: typer.Typer = app) -> None:
    """Run the command line. User errors print one line and exit with code 2, without a traceback."""
    try:
        commands()
    except PacelineError as error:
        _fail(str(error))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in DISK_REMEDIES:
            place = f"{error.filename}: " if error.filename else ""
            _fail(f"{place}{error.strerror}. {DISK_REMEDIES[error.errno]}")
        if not _lacks_memory(error):
            raise
        _fail(f"there is not enough memory{f' ({error})' if str(error) else ''}. {MEMORY_REMEDY}")


def _lacks_memory(error: Exception) -> bool:
    """Whether an error means a lack of memory. Libraries that fail to load report it in many ways."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return (
        isinstance(error, MemoryError)
        or "can't start new thread" in str(error)
        or (isinstance(error, OSError | ImportError) and 0 <= limit < MIN_ADDRESS_SPACE)
    )


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise SystemExit(2) from None


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
@with_flags(sampling=having(SAMPLING, max_tokens=256), structure=STRUCTURE, engine=ENGINE)
def generate(
    sampling: Options,
    structure: Options,
    engine: Options,
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[list[str] | None, typer.Option(help="Prompt. May be repeated.")] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File that holds one prompt. May be repeated.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put each prompt through the chat template.")] = False,
    system: System = None,
    config: ConfigFile = None,
    as_json: AsJson = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print tokens per second and cache hits.")] = False,
) -> None:
    """Generate text from --prompt, --prompt-file or standard input."""
    from paceline.terminal.generate import generate

    generate(
        model,
        prompt or [],
        prompt_file or [],
        engine,
        sampling,
        structure,
        chat=chat,
        system=system,
        as_json=as_json,
        stats=stats,
    )


@app.command()
@with_flags(
    sampling=having(
        without(SAMPLING, "n", "logprobs", "prompt_logprobs"), temperature=0.7, top_p=0.95, max_tokens=1024
    ),
    engine=ENGINE,
)
def chat(
    sampling: Options,
    engine: Options,
    model: Model = DEFAULT_MODEL,
    system: System = None,
    config: ConfigFile = None,
) -> None:
    """Chat with a model in the terminal."""
    from paceline.terminal.chat import chat

    chat(model, engine, sampling, system)


@app.command()
def check(
    model: Annotated[
        str | None,
        typer.Option(help="Model to test; downloaded if necessary."),
    ] = None,
    with_torch: Annotated[bool, typer.Option("--torch", help="Also show the devices of torch.")] = False,
    isa: Annotated[
        str | None,
        typer.Option(
            help="Instruction set of the CPU kernels: amx, avx512vnni, avxvnni, avx512, avx2, neon or "
            "portable. Default: the best of this CPU. For other commands, set PACELINE_ISA."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine and the chosen kernels, and test that they are correct."""
    if isa is not None:
        force_isa(isa)
    from paceline.check.command import check, show

    report = check(model, with_torch)
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        show(report)
    raise typer.Exit(0 if report.passed else 1)


@app.command()
@with_flags(
    server=SERVER,
    engine=(*by_topic(ENGINE, {"": "max_model_len max_num_seqs"}), SEED),
    learn=LEARN,
    scale=SCALE,
)
def serve(
    server: Options,
    engine: Options,
    learn: Options,
    scale: Options,
    model: OptionalModel = None,
    config: ConfigFile = None,
) -> None:
    """Serve a model, or several with --routes, over HTTP with the OpenAI API."""
    from paceline.scale.options import ScaleOptions

    with needs_extra("serve", "`paceline serve`"):
        from paceline.serve.server import serve
    if not ScaleOptions(**scale).wanted:
        serve(model, engine, server, learn)
        return
    from paceline.scale.command import serve_replicas

    serve_replicas(model, engine, server, scale, learn)


@app.command()
def export(
    head: Annotated[str, typer.Argument(help="A draft head: its folder, file or hub id, or shipped.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    form: Annotated[str, typer.Option("--format", help="Whose format: vllm, sglang or speculators.")],
    target: Annotated[
        str, typer.Option(help="What others call its target: a hub id, or a path of theirs.")
    ] = "",
    quantization: Annotated[
        str | None, typer.Option(help="Round its matrices: int4 or int8. Default: 16 bits, or as they are.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a head that is there.")] = False,
) -> None:
    """Write a draft head for another engine, and print the command that launches it there."""
    from paceline.models.heads.export import export_head

    launch = export_head(head, folder, form, target, quantization, force)
    typer.echo(f"{folder}\n{launch}")


app.command("simulate")(simulate_command)


def _mount(name: str, target: str, extra: str | None, summary: str, single: bool = False) -> None:
    """Add the group of commands, or the `single` command, at `target` (MODULE:NAME). It is imported on first
    use; `extra` is the optional dependency that it needs.
    """

    @app.command(name, context_settings=ANY_ARGUMENTS, add_help_option=False, help=summary)
    def run_subcommand(context: typer.Context) -> None:
        module, _, attribute = target.partition(":")
        with nullcontext() if extra is None else needs_extra(extra, f"`paceline {name}`"):
            mounted = getattr(importlib.import_module(module), attribute)
            subcommands = App()
            subcommands.callback()(lambda: None)  # so that a single command keeps its name
            if single:
                subcommands.command(name, no_args_is_help=True)(mounted)
            else:
                subcommands.add_typer(mounted, name=name)
            subcommands([name, *context.args], prog_name="paceline")


_mount("models", "paceline.terminal.models:app", None, "List, download and inspect models.")
_mount("bench", "paceline.bench.commands:app", "bench", "Measure speed on this machine and your traffic.")
_mount(
    "tune",
    "paceline.bench.tune.command:tune_command",
    "bench",
    "Find the fastest drafting method for your traffic.",
    single=True,
)
_mount(
    "readiness",
    "paceline.bench.readiness.command:readiness_command",
    "bench",
    "Check everything before you switch speculation on.",
    single=True,
)
_mount("train", "paceline.train.commands:app", "train", "Train a draft head on the target's own answers.")
_mount("learn", "paceline.learn.commands:app", "train", "Learn from the traffic that a server has kept.")
_mount(
    "scale", "paceline.scale.commands:app", "serve", "Write the file that deploys replicas to a Ray cluster."
)
