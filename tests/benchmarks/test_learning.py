"""`python -m benchmarks learning`: its traffic, and what is drawn of it."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.learning import unattended
from benchmarks.learning.command import picture_of
from benchmarks.learning.domains import DOMAINS, conversations, numbered_chats
from benchmarks.learning.load import LearningLoadError, check_trains, trainer_seconds
from benchmarks.learning.load_report import Compared, Side, Turn, learning_load_result
from benchmarks.learning.shift import Shift, ShiftOptions, Window
from benchmarks.learning.unattended import Answered, UnattendedOptions
from paceline.errors import ConfigError


@pytest.mark.parametrize("domain", DOMAINS)
def test_every_prompt_is_sent_once_and_is_the_same_on_every_machine(domain: str) -> None:
    first, second = conversations(domain, 0, 120), conversations(domain, 120, 120)
    assert conversations(domain, 60, 120) == [*first[60:], *second[:60]]
    assert len({str(chat) for chat in [*first, *second]}) == 240
    assert all(chat[-1]["role"] == "user" for chat in first)


def test_templates_that_give_too_few_prompts_are_an_error_and_numbered_chats_never_end() -> None:
    with pytest.raises(ConfigError, match="560 different prompts and 601 are needed"):
        conversations("chat", 1, 600)
    chats = numbered_chats(1000, 700)
    assert len({str(chat) for chat in chats}) == 700
    assert chats[100:] == numbered_chats(1100, 600)


def test_the_gain_is_of_the_last_windows_and_swaps_are_drawn() -> None:
    windows = [
        Window("chat", 10, 2.0, 2.0, True),
        Window("tools", 20, 2.0, 2.0, True, swapped=True),
        Window("tools", 30, 2.0, 3.0, True),
        Window("tools", 40, 2.0, 2.5, True),
        Window("chat", 50, 2.0, 1.98, True),
    ]
    shift = Shift(ShiftOptions("m", before=1, window=10), windows, 1.0)
    assert shift.gain("tools", last=2) == pytest.approx(1.375)
    assert shift.gain("chat", last=1) == pytest.approx(0.99)
    drawing = picture_of(shift)
    assert drawing.startswith("<svg")
    assert drawing.count("<polyline") == 3
    assert "swap" in drawing
    root = ElementTree.fromstring(drawing)
    width = float(root.attrib["viewBox"].split()[2])
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        letters = 0.62 * 12 * len(text.text or "")  # pixels at most, of a usual font of this size
        share = {"end": 1.0, "middle": 0.5}.get(text.attrib.get("text-anchor", ""), 0.0)
        left = float(text.attrib["x"]) - share * letters
        assert left >= 0, text.text
        assert left + letters <= width, text.text


def test_servers_are_compared_by_throughput_and_p95_latency_with_the_bar_of_their_load() -> None:
    without = Side([Turn(2.0, 204, [0.1] * 19 + [0.4], served=4.0), Turn(2.0, 196, [0.1] * 20)])
    slower = Side([Turn(2.5, 204, [0.1] * 19 + [0.4], passes=102, served=4.0), Turn(2.0, 196, [0.1] * 20)])
    learning = Side(
        [
            Turn(2.0, 190, [0.1] * 20, trained=1.0, served=4.0, steps=3),
            Turn(2.0, 190, [0.1] * 16 + [0.5] * 4, steps=4),
        ]
    )
    one, many = (Compared(clients, without, without, learning) for clients in (1, 16))
    assert one.throughput_ratio == pytest.approx(0.95)
    assert one.latency_ratio == pytest.approx(0.2)
    # the rounds have 190 / 204 and 190 / 196 of the throughput, and 4 and 0.2 times the p95 latency
    assert [ratio for pair in one.by_round for ratio in pair] == pytest.approx([190 / 204, 4, 190 / 196, 0.2])
    assert one.median_ratio == pytest.approx(1.0)
    assert one.spread == pytest.approx((0.0200, 1.498), abs=1e-3)
    assert (one.steps, sum(many.steps)) == ([3, 4], 7)
    assert (one.bar, many.bar) == (0.95, 0.99)
    assert Compared(1, without, without, learning, "cuda").bar == 0.97
    assert Compared(1, without, slower, learning).throughput_ratio == pytest.approx(95 / (800 / 8.5))
    assert Compared(1, without, slower, learning).noise == pytest.approx(4 / 4.5)
    assert slower.tokens_per_pass == pytest.approx(400 / 102)
    (table,) = learning_load_result([one, many], {"model": "m"}).tables
    assert table.rows[0][4] == "1.000"  # without over without: servers that should be equal
    assert table.rows[0][5] == "0.950"  # the server's CPU time per token
    assert table.rows[0][-2] == "0.250"  # seconds of the trainer per second


def test_a_trainer_on_a_gpu_that_has_not_computed_yet_has_no_seconds_of_a_cpu() -> None:
    state = {"computed_seconds": 0.0}
    assert trainer_seconds(state, os.getpid(), "cuda") == 0.0
    assert trainer_seconds(state, os.getpid(), "cpu") > 0.0


def test_a_turn_after_the_training_has_ended_is_an_error() -> None:
    check_trains({"planned_steps": 30, "training_steps": 12})
    with pytest.raises(LearningLoadError, match="ended after 30 steps"):
        check_trains({"planned_steps": 0, "training_steps": 30})


def test_an_unattended_server_gets_each_prompt_once_until_it_has_swapped_and_unsent_ones_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, sent = 0.0, list[Any]()
    options = UnattendedOptions("m", rate=2.0, chats=3, held_out=4, limit=20.0)

    def answer(server: object, chat: Any, tokens: int, phase: str = "") -> Answered:
        nonlocal now
        now += 0.1
        sent.append(chat)
        return Answered(phase, 0.1, 31, 20 if server == "learning" else 15, str(chat))

    def state(server: object) -> dict[str, Any]:
        swaps = int(len(sent) >= 9)
        return {
            **dict.fromkeys(unattended.SHOWN, 0),
            "phase": "trial" if swaps else "training",
            "swaps": swaps,
        }

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(unattended, "_answer", answer)
    monkeypatch.setattr(unattended, "learn_state", state)
    monkeypatch.setattr(unattended, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    traffic = unattended.Traffic(options, "learning", lambda line: None)
    traffic.run()
    result = traffic.result
    assert result.swapped_after == pytest.approx(9 / 2.0, abs=0.7)
    assert sent[:3] == numbered_chats(0, 3)
    assert sent[3:] == conversations("tools", 0, result.requests - 3)
    assert {phase: len(each) for phase, each in result.latencies.items()} == {
        "collecting": 1,
        "training": result.requests - 1,
    }
    unsent = traffic.unsent()
    assert [len(unsent[kind]) for kind in ("tools", "chat")] == [4, 4]
    assert not [chat for chats in unsent.values() for chat in chats if chat in sent]
    unattended.compare(result, "static", "learning", unsent)
    assert result.ratio("tools") == pytest.approx(15 / 10)
    assert result.same
    now, sent[:] = 0.0, []
    late = unattended.Traffic(replace(options, limit=2.0), "learning", lambda line: None)
    late.run()
    assert late.result.swapped_after is None
    assert late.result.requests == 4
    with pytest.raises(LearningLoadError, match="no more than the 3 chats"):
        replace(options, limit=1.0)
