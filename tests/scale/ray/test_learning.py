"""`--replicas` with `--learn`: rows of all replicas in one folder, and its head on every replica."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import httpx

from paceline.learn.data.store import TrafficStore
from paceline.learn.evaluation.history import History
from paceline.models.heads.checkpoint import load_head, write_head
from paceline.models.heads.fingerprint import head_fingerprint, target_fingerprint
from paceline.models.heads.registry import resolve_head
from paceline.models.registry import load_checkpoint, resolve
from tests.scale.ray.harness import CLIENTS, MODEL, Answers, Clients, Server, disturbed, kill


def test_a_promoted_head_serves_on_every_replica_and_on_one_that_replaces_a_killed_one(
    tmp_path: Path, truth: Answers
) -> None:
    learned = tmp_path / "learned"
    shipped = resolve_head("shipped", "eagle3", target_fingerprint(load_checkpoint(resolve(MODEL))))
    write_head(load_head(shipped), tmp_path / "candidate", "sglang")
    history = History(learned / "heads", shipped)
    learn = ("--learn", "--learn-dir", str(learned), "--learn-min-rows", "1000000")
    with Server(tmp_path, "--replicas", "2", "--threads", "1", *learn) as server:

        def serve(*heads: str) -> None:
            server.wait_until(lambda: [replica["head"] for replica in server.replicas()] == list(heads))

        server.wait_for_replicas(2)
        history.promote(history.add(tmp_path / "candidate", {}).number)
        head = head_fingerprint(learned / "heads" / "0001")
        serve(head, head)
        victim = server.replicas()[0]["pid"]
        asyncio.run(disturbed(server.url, lambda: kill(victim), truth))
        server.wait_for_replicas(2, without=frozenset([victim]))
        serve(head, head)
        assert server.get("/learn")["head"] == 1
        assert "paceline:learn_head{" in httpx.get(server.url + "/metrics").text  # shows the page's panel
        subprocess.run(
            [sys.executable, "-m", "paceline", "learn", "rollback", "--dir", str(learned)], check=True
        )
        serve("", "")
        assert asyncio.run(Clients(server.url, 10).run()) == truth[:10]
    assert TrafficStore(learned / "traffic").count().rows >= CLIENTS + 10
