"""`paceline scale`: files for clusters."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from paceline.config import DEFAULT_MODEL, EngineConfig
from paceline.errors import ConfigError
from paceline.scale.ray.cluster import Resources, import_ray, needs_gpu
from paceline.scale.ray.ingress import split_options
from paceline.terminal.flag_groups import ENGINE, SCALE, SEED, SERVER
from paceline.terminal.flags import Options, with_flags
from paceline.terminal.help import App

Model = Annotated[str, typer.Argument(help="An alias, a .gguf file, a folder of safetensors or a hub id.")]

app = App(help="Run replicas on a Ray cluster.", no_args_is_help=True)


@app.callback()
def main() -> None:
    pass


@app.command()
@with_flags(scale=SCALE, engine=(*ENGINE, SEED), server=SERVER)
def config(scale: Options, engine: Options, server: Options, model: Model = DEFAULT_MODEL) -> None:
    """Print the YAML file that `serve deploy` takes for this model and these flags."""
    typer.echo(serve_config(model, {**engine, **server, **scale}), nl=False)


def serve_config(model: str, options: dict[str, Any]) -> str:
    """The YAML. Options that have their default values are left out."""
    defaults = {flag.name: flag.default for flag in (*ENGINE, SEED, *SERVER, *SCALE)}
    ours = ("host", "port", "ray_address", "otlp_endpoint")  # of a process that Serve replaces
    for name in ours:
        if options.get(name, defaults[name]) != defaults[name]:
            raise ConfigError(
                f"--{name.replace('_', '-')} is for `paceline serve`. Leave it out, and change Serve's own "
                "http_options or the environment."
            )
    given = {name: value for name, value in options.items() if value != defaults[name] and name not in ours}
    engine, server, scale = split_options(given)
    checked = EngineConfig.from_options(model=model, lora_modules=server.lora_modules, **engine)
    if not scale.wanted:
        raise ConfigError("say how many replicas: --replicas N or --autoscale MIN:MAX.")
    import_ray()
    from paceline.scale.ray.deployment import deployment_options

    if not (on_gpus := needs_gpu(checked.backend)):
        given.setdefault("threads", 1)
    share = Resources(None if on_gpus else given["threads"], checked.backend.tensor_parallel_size)
    replica = deployment_options(checked, server, scale)
    content = {
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [
            {
                "name": "paceline",
                "route_prefix": "/",
                "import_path": "paceline.scale:application",
                "args": {"model": model, **given},
                "deployments": [
                    {"name": "Replica", **replica, "ray_actor_options": share.for_actor()},
                    {"name": "Ingress", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
                ],
            }
        ],
    }
    return "\n".join(_yaml(content)) + "\n"


def _yaml(value: Any, indent: str = "") -> list[str]:
    """A value of objects, lists and scalars as lines of YAML; scalars as in JSON, which YAML contains."""
    lines: list[str] = []
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, dict | list) and item:
                lines += [f"{indent}{key}:", *_yaml(item, indent + "  ")]
            else:
                lines.append(f"{indent}{key}: {json.dumps(item)}")
    else:
        for item in value:
            first, *others = _yaml(item, indent + "  ") if isinstance(item, dict) else [json.dumps(item)]
            lines += [f"{indent}- {first.strip()}", *others]
    return lines
