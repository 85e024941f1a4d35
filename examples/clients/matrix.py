"""Tries clients against a server: python examples/clients/matrix.py --url http://127.0.0.1:8000/v1

Each client has its own file, with_NAME.py, and each of its functions is a cell of the table. Clients run in
their own processes, so that one cannot break another. Those that are not installed are named with the command
that installs them. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from asked import Target

HERE = Path(__file__).parent
ROWS = ("plain", "streamed", "tools", "structured", "scores")
TIMEOUT = 600  # seconds for one client
MAX_SHOWN = 300  # characters of an answer or an error


@dataclass(frozen=True)
class Client:
    """A client of the matrix."""

    name: str
    module: str
    package: str  # its distribution, or its folder in node_modules
    install: str  # the command that installs it
    is_node: bool = False

    @property
    def version(self) -> str | None:
        """The installed version; None if it is not installed."""
        if self.is_node:
            manifest = HERE / "node_modules" / self.package / "package.json"
            return json.loads(manifest.read_text())["version"] if manifest.exists() else None
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


CLIENTS = (
    Client("openai", "with_openai", "openai", "pip install openai"),
    Client("anthropic", "with_anthropic", "anthropic", "pip install anthropic"),
    Client("litellm", "with_litellm", "litellm", "pip install litellm"),
    Client("langchain-openai", "with_langchain", "langchain-openai", "pip install langchain-openai"),
    Client("instructor", "with_instructor", "instructor", "pip install instructor"),
    Client("pydantic-ai", "with_pydantic_ai", "pydantic-ai-slim", "pip install 'pydantic-ai-slim[openai]'"),
    Client("openai-agents", "with_openai_agents", "openai-agents", "pip install openai-agents"),
    Client("lm-eval", "with_lm_eval", "lm-eval", "pip install 'lm-eval[api]'"),
    Client("Vercel AI SDK", "with_vercel_ai", "ai", "npm install --prefix examples/clients", is_node=True),
)


@dataclass
class Result:
    """What became of one client."""

    client: str
    version: str | None
    cells: dict[str, str] = field(default_factory=dict)  # by row: ok or failed
    details: dict[str, str] = field(default_factory=dict)  # by row: the answer or the error
    note: str = ""  # why nothing was tried


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the clients; 1 if one of them failed."""
    parser = argparse.ArgumentParser(description="Try clients against a server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="of OpenAI's API (%(default)s)")
    parser.add_argument("--model", help="default: the first that the server names")
    parser.add_argument("--api-key", default=os.environ.get("PACELINE_API_KEY", "-"))
    parser.add_argument("--only", help="names of clients, with commas between them")
    parser.add_argument("--json", action="store_true", help="every answer and error, as JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # the module of one client, in its own process
    options = parser.parse_args(arguments)
    url = options.url.rstrip("/")
    if options.one:
        return _try_rows(options.one, Target(url, options.model, options.api_key))
    names = None if options.only is None else options.only.split(",")
    unknown = set(names or ()) - {client.name for client in CLIENTS}
    if unknown:
        parser.error(f"no client is named {', '.join(sorted(unknown))}: there are {_listed()}")
    try:
        model = options.model or _first_model(url, options.api_key)
    except (urllib.error.URLError, ValueError, LookupError) as error:
        parser.error(f"{url}/models cannot be read ({error}): start `paceline serve`, or give --url")
    target = Target(url, model, options.api_key)
    results = [_tried(client, target) for client in CLIENTS if names is None or client.name in names]
    print(json.dumps([asdict(result) for result in results], indent=2) if options.json else _table(results))
    return int(any("failed" in result.cells.values() for result in results))


def _listed() -> str:
    return ", ".join(client.name for client in CLIENTS)


def _first_model(url: str, api_key: str) -> str:
    request = urllib.request.Request(f"{url}/models", headers={"Authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return str(json.load(answer)["data"][0]["id"])


def _tried(client: Client, target: Target) -> Result:
    """The result of a client, tried in its own process."""
    installed = client.version
    if installed is None:
        return Result(client.name, None, note=f"not installed: {client.install}")
    print(f"{client.name} {installed} ...", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, "--one", client.module, "--url", target.url]
    command += ["--model", target.model, "--api-key", target.api_key]
    result = Result(client.name, installed)
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        result.cells, result.details = json.loads(run.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        result.cells, result.details = {"plain": "failed"}, {"plain": f"no end after {TIMEOUT} seconds"}
    except (IndexError, ValueError):  # it died before it could say anything
        result.cells, result.details = {"plain": "failed"}, {"plain": run.stderr[-MAX_SHOWN:]}
    return result


def _try_rows(module: str, target: Target) -> int:
    """Try the rows that a client has. The last line of the output is their cells and details, as JSON."""
    client = importlib.import_module(module)
    cells, details = {}, {}
    for row in ROWS:
        function = getattr(client, row, None)
        if function is None:
            continue
        try:
            cells[row], details[row] = "ok", str(function(target))[:MAX_SHOWN]
        except Exception as error:
            cells[row], details[row] = "failed", f"{type(error).__name__}: {error}"[:MAX_SHOWN]
    print(json.dumps([cells, details]))
    return 0


def _table(results: Sequence[Result]) -> str:
    """A Markdown table, and below it why cells failed."""
    lines = [f"| client | version | {' | '.join(ROWS)} |", f"| --- | --- |{' --- |' * len(ROWS)}"]
    for result in results:
        cells = [result.cells.get(row, "–") for row in ROWS]
        if result.note:
            cells = [result.note, *[""] * (len(ROWS) - 1)]
        lines.append(f"| {result.client} | {result.version or '–'} | {' | '.join(cells)} |")
    failed = [
        f"{result.client}, {row}: {result.details[row]}"
        for result in results
        for row, cell in result.cells.items()
        if cell == "failed"
    ]
    return "\n".join([*lines, *([""] if failed else []), *failed])


if __name__ == "__main__":
    sys.exit(main())
