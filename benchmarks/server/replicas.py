"""A server of two replicas, what it is asked, how its processes are found, and faults to inject."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server.process import ServerProcess
from paceline.bench.servers.client import Answer, Server, get, post
from paceline.errors import PacelineError

START_SECONDS = 300.0
MAX_NUM_SEQS = 64  # of each server: one replica can run all clients when the other is gone
ALONE = ("--threads", "1", "--max-num-seqs", str(MAX_NUM_SEQS))
REPLICAS = ("--replicas", "2", *ALONE)

REDEPLOY = """
import json, sys
import ray
from ray import serve
from paceline.config import EngineConfig
from paceline.scale.ray.deployment import replica_application
from paceline.scale.options import ScaleOptions
from paceline.serve.options import ServeOptions

address, model, engine = sys.argv[1], sys.argv[2], {"threads": 1, **json.loads(sys.argv[3])}
ray.init(address=address, namespace="paceline")
options = ServeOptions(drain_timeout=120)
config = EngineConfig.from_options(model=model, **engine)
app = replica_application(config, options, ScaleOptions(replicas=2), {"num_cpus": 1})
serve.run(app, name="paceline", route_prefix=None)
"""
GCS_ADDRESS = "--gcs-address="  # a flag of Ray's node process


def redeploy(server: int, model: str, **engine: Any) -> None:
    """Replace both replicas of a server process, one after the other, by others with these options."""
    arguments = [cluster_address(server), model, json.dumps(engine)]
    command = [sys.executable, "-c", REDEPLOY, *arguments]
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}  # the server's cluster has one, as Ray's do
    ended = subprocess.run(
        command, timeout=START_SECONDS, capture_output=True, text=True, env=environment, check=False
    )
    if ended.returncode:
        raise PacelineError(f"the replicas were not replaced: {ended.stderr[-1000:]}")


def cluster_address(server: int) -> str:
    """The address of the Ray cluster that a server process started."""
    (node,) = children(server, "raylet")
    arguments = Path(f"/proc/{node}/cmdline").read_text().split("\0")
    return next(one for one in arguments if one.startswith(GCS_ADDRESS)).removeprefix(GCS_ADDRESS)


def children(pid: int, program: str) -> list[int]:
    """The child processes of a process that run this program."""
    found = []
    for folder in [folder for folder in Path("/proc").iterdir() if folder.name.isdigit()]:
        with suppress(OSError):  # it has ended
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text().split("\0")
            if parent == pid and Path(command[0]).name == program:
                found.append(int(folder.name))
    return found


@dataclass
class Fleet:
    """A running server of replicas."""

    model: str
    server: Server
    pid: int  # of the server's process
    num_restarts: int = 0

    async def state(self) -> dict[str, Any]:
        """The replicas that answer, and how often a request was resumed."""
        found: dict[str, Any] = json.loads((await get(self.server, "/replicas")).body)
        return found

    def replicas(self) -> dict[str, Any]:
        """The same, outside of an event loop."""
        return asyncio.run(self.state())

    def pids(self) -> list[int]:
        return [replica["pid"] for replica in self.replicas()["replicas"]]

    def wait_for(self, count: int = 2, without: frozenset[int] = frozenset()) -> None:
        """Wait until this number of replicas answer, none of them one of these processes."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            pids = self.pids()
            if len(pids) == count and 0 not in pids and not without & set(pids):
                return
            if time.monotonic() > deadline:
                raise PacelineError("a replica takes too long to come back. Look into the logs of Ray Serve.")
            time.sleep(0.2)

    def restart(self) -> None:
        """Replace all replicas, one after the other."""
        self.num_restarts += 1
        redeploy(self.pid, self.model, max_num_seqs=MAX_NUM_SEQS + self.num_restarts % 2)


@dataclass(frozen=True)
class Fault:
    """Something that is done to a fleet, or to a replica with a process id."""

    do: Callable[[Fleet, int], None]
    loses: bool = False  # answers lose their replica


FAULTS: Mapping[str, Fault] = {
    "kill": Fault(lambda fleet, pid: os.kill(pid, signal.SIGKILL), loses=True),
    "hang": Fault(lambda fleet, pid: os.kill(pid, signal.SIGSTOP), loses=True),
    "restart": Fault(lambda fleet, pid: fleet.restart()),
    "none": Fault(lambda fleet, pid: None),
}


def body(number: int, tokens: int, cache_salt: str = "") -> dict[str, Any]:
    """The request of a client; half of them sample. A salt of its own finds nothing in prefix caches."""
    prompt = f"Question {number}: what should everyone know about the number {number}?\nAnswer:"
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"cache_salt": cache_salt} if cache_salt else {}),
        **sampling,
    }


async def ask_all(server: Server, clients: int, tokens: int, cache_salt: str = "") -> list[Answer]:
    """The answers to clients that all ask at once."""
    bodies = [body(number, tokens, cache_salt) for number in range(clients)]
    asked = [post(server, "/v1/completions", each) for each in bodies]
    return list(await asyncio.gather(*asked))


def answers_alone(model: str, clients: int, tokens: int) -> list[str]:
    """What one process answers."""
    with ServerProcess(model, *ALONE) as alone:
        return [answer.text for answer in asyncio.run(ask_all(alone.server, clients, tokens))]


def cpu_seconds(root: int) -> float:
    """CPU time of a process and of all that descend from it, those that have ended included."""
    ticks: dict[int, int] = {}
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                values = (folder / "stat").read_text().rpartition(")")[2].split()
                ticks[int(folder.name)] = sum(map(int, values[11:15]))  # utime, stime, cutime, cstime
                children.setdefault(int(values[1]), []).append(int(folder.name))
    total, waiting = 0, [root]
    while waiting:
        process = waiting.pop()
        total += ticks.get(process, 0)
        waiting += children.get(process, [])
    return total / os.sysconf("SC_CLK_TCK")
