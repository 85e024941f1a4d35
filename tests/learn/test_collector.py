"""The collector keeps what it may keep, and never holds up a request."""

from __future__ import annotations

import ast
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.params import SamplingParams
from paceline.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput, SpeculativeMetrics
from paceline.errors import ConfigError
from paceline.learn.data.collector import Collector, Origin, Policy
from paceline.learn.data.collector import __file__ as collector_file
from paceline.learn.data.rows import TrafficRow
from paceline.learn.data.selection import ALL_SALTS, Selection, choose
from paceline.learn.data.store import StoreLimits, TrafficStore
from paceline.learn.evaluation.score import gate_rows
from paceline.learn.options import SALTS, LearnOptions, Redact
from paceline.models.heads.config import TargetName
from paceline.serve.learning import trained_salt

PARAMS = SamplingParams(temperature=0.5, top_p=0.9)
ORIGIN = Origin(PARAMS, "sql")


def output(prompt: int, *reasons: str) -> RequestOutput:
    """A finished request, one output for each finish reason."""
    outputs = [
        CompletionOutput(index, "", [prompt, index, 7], reason, None, None, None)
        for index, reason in enumerate(reasons or ("stop",))
    ]
    metrics = RequestMetrics(0.0, 0.0, 0.0, 0.0, 0, 0, SpeculativeMetrics())
    return RequestOutput("id", None, [prompt, 1, 2], None, outputs, True, metrics)


def kept(
    folder: Path,
    offers: list[tuple[RequestOutput, Origin]],
    policy: Policy | None = None,
    redact: Redact | None = None,
) -> tuple[list[TrafficRow], Collector]:
    """The rows that are in the store after these requests, and the collector."""
    store = TrafficStore(folder, TargetName("f00d", "m"), 1000, StoreLimits())
    collector = Collector(store, policy or Policy(), redact, lambda ids: "-".join(map(str, ids)))
    for finished, origin in offers:
        collector.offer(finished, origin)
    collector.close()
    return list(TrafficStore(folder).rows()), collector


def test_complete_answers_are_kept_with_how_they_were_sampled(tmp_path: Path) -> None:
    (first, second), collector = kept(tmp_path, [(output(5, "stop", "abort", "length"), ORIGIN)])
    assert (first.prompt_ids, first.output_ids, first.segment) == ((5, 1, 2), (5, 0, 7), "sql")
    assert second.output_ids == (5, 2, 7)
    assert (first.sampling.temperature, first.sampling.truncation.top_p, first.sampling.constrained) == (
        0.5,
        0.9,
        False,
    )
    assert (first.salt, first.key) == ("", "")
    assert collector.counts.kept == 2


@pytest.mark.parametrize(
    ("policy", "origin", "is_kept"),
    [
        (Policy(), replace(ORIGIN, allowed=False), False),
        (Policy(), replace(ORIGIN, cache_salt="s"), False),
        (Policy(salts="shared"), replace(ORIGIN, cache_salt="s"), True),
        (Policy(salts="own"), replace(ORIGIN, cache_salt="s"), True),
        (Policy(salts="shared"), replace(ORIGIN, cache_salt="s", allowed=False), False),
        (Policy(only="s"), replace(ORIGIN, cache_salt="s"), True),
        (Policy(only="s"), replace(ORIGIN, cache_salt="t"), False),
        (Policy(only="s"), ORIGIN, False),
        (Policy(), replace(ORIGIN, key="k"), True),
        (Policy(separate_keys=True), replace(ORIGIN, key="k"), False),
        (Policy(skipped_keys=frozenset({"k"})), replace(ORIGIN, key="k"), False),
        (Policy(skipped_keys=frozenset({"k"})), replace(ORIGIN, key="j"), True),
    ],
)
def test_requests_are_refused_by_their_client_their_salt_or_their_key(
    tmp_path: Path, policy: Policy, origin: Origin, is_kept: bool
) -> None:
    rows, collector = kept(tmp_path, [(output(5), origin)], policy)
    assert len(rows) == is_kept
    assert collector.counts.refused == (not is_kept)
    if is_kept:
        store = TrafficStore(tmp_path)
        assert (rows[0].salt, rows[0].key) == (store.hash(origin.cache_salt), store.hash(origin.key))
        assert origin.cache_salt not in rows[0].salt or not origin.cache_salt


def test_rows_of_a_salt_train_and_judge_the_head_of_that_salt_alone(tmp_path: Path) -> None:
    """From requests to what training, its end and the gate get; `salt` is what the commands take."""
    clients = ("", "mine", "yours")
    offers = [(output(number), replace(ORIGIN, cache_salt=clients[number % 3])) for number in range(10, 910)]
    rows, _ = kept(tmp_path, offers, Policy(salts="own"))
    store = TrafficStore(tmp_path)

    def used(salt: str) -> set[int]:
        """The first tokens of all prompts that a head of this salt learns from or is judged by."""
        chosen = choose(rows, [], Selection(salt=salt))
        groups = [chosen.train, *chosen.stop.values(), gate_rows(rows, salt=salt)]
        assert all(groups)
        return {row.prompt_ids[0] for group in groups for row in group}

    for place, client in enumerate(clients):
        assert {number % 3 for number in used(store.hash(client))} == {place}
    assert {number % 3 for number in used(ALL_SALTS)} == {0, 1, 2}
    served = {salts: trained_salt(Policy(salts), store) for salts in SALTS}
    assert served == {"off": "", "own": "", "shared": ALL_SALTS}  # of the head that drafts for everyone
    assert trained_salt(Policy(only="mine"), store) == store.hash("mine")


def test_a_share_is_chosen_by_hash(tmp_path: Path) -> None:
    offers = [(output(prompt), ORIGIN) for prompt in range(400)]
    rows, collector = kept(tmp_path / "1", offers, Policy(share=0.25))
    again, _ = kept(tmp_path / "2", offers, Policy(share=0.25))
    assert len(rows) == pytest.approx(100, abs=30)
    assert [row.prompt_ids for row in rows] == [row.prompt_ids for row in again]
    assert collector.counts.not_sampled == 400 - len(rows)


def hide_fives(row: TrafficRow, decode: object) -> TrafficRow | None:
    """A redaction: drops prompts that begin with 9, fails for 8, and replaces the token 5."""
    assert callable(decode)
    if decode(row.prompt_ids).startswith("9-"):
        return None
    if row.prompt_ids[0] == 8:
        raise ValueError("cannot redact")
    hidden = tuple(0 if token == 5 else token for token in row.prompt_ids)
    return replace(row, prompt_ids=hidden)


def test_redaction_changes_or_drops_a_row_and_what_it_fails_for_is_not_kept(tmp_path: Path) -> None:
    redact = LearnOptions(learn=True, learn_redact="tests.learn.test_collector:hide_fives").redact()
    rows, collector = kept(tmp_path, [(output(number), ORIGIN) for number in (5, 9, 8, 6)], None, redact)
    assert [row.prompt_ids for row in rows] == [(0, 1, 2), (6, 1, 2)]
    assert (collector.counts.redacted, collector.counts.failed, collector.counts.kept) == (1, 1, 2)
    with pytest.raises(ConfigError, match="--learn-redact must be MODULE:FUNCTION"):
        LearnOptions(learn=True, learn_redact="no_such_module:f").redact()


def test_a_full_disk_ends_keeping_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: TrafficStore, row: TrafficRow) -> bool:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TrafficStore, "append", full)
    with caplog.at_level(logging.WARNING, "paceline"):
        rows, _ = kept(tmp_path, [(output(number), ORIGIN) for number in range(20)])
    assert rows == []
    assert [record.message.count("no more traffic is kept") for record in caplog.records] == [1]


def test_nothing_that_learns_can_reach_a_network() -> None:
    """The rooms that see rows import no module that opens a connection."""
    ways = {"aiohttp", "ftplib", "http", "httpx", "requests", "smtplib", "socket", "ssl", "urllib", "urllib3"}
    folder = Path(collector_file).parent
    for path in [*folder.glob("*.py"), *(folder.parent / "train").glob("*.py")]:
        tree = ast.parse(path.read_text())
        names = [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not ways & {name.partition(".")[0] for name in names}, path.name
