"""The store of traffic: bounded, and readable whatever was killed, filled or damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.core.truncation import Truncation
from paceline.errors import ConfigError
from paceline.learn.data.rows import Damage, RowSampling, TrafficRow
from paceline.learn.data.split import GATE_SHARE, STOP_SHARE, Side, side_of
from paceline.learn.data.store import StoreLimits, TrafficStore, open_store
from paceline.models.heads.config import TargetName

TARGET = TargetName("f00d", "a-model")
VOCAB = 1000


def store_in(folder: Path, limits: StoreLimits | None = None, now: list[float] | None = None) -> TrafficStore:
    clock = [1e9] if now is None else now
    return TrafficStore(folder, TARGET, VOCAB, limits or StoreLimits(), lambda: clock[0])


def row(number: int, tokens: int = 8, time: float = 1e9) -> TrafficRow:
    ids = tuple((number + place) % VOCAB for place in range(tokens))
    return TrafficRow(ids, ids[::-1], "sql", RowSampling(0.7, Truncation(top_p=0.9)), "5a17", "4e7", time)


def test_a_row_of_before_an_option_existed_kept_everything_by_it() -> None:
    facts = RowSampling(0.7, Truncation(top_p=0.9), constrained=True).facts()
    assert list(facts) == ["temperature", *Truncation._fields, "constrained"]  # what segment files hold
    del facts["min_p"]
    assert RowSampling.of_facts(facts) == RowSampling(0.7, Truncation(top_p=0.9), constrained=True)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.rows"))


def test_rows_are_read_as_they_were_appended_also_while_the_store_is_written(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(20):
        store.append(row(number))
        assert list(TrafficStore(tmp_path).rows()) == [row(each) for each in range(number + 1)]
    count = store.count()
    assert (count.rows, count.damage, count.oldest) == (20, Damage(), 1e9)
    assert count.bytes == sum(path.stat().st_size for path in segments(tmp_path))


def test_the_newest_rows_are_read_across_segments_and_no_segment_before_them(tmp_path: Path) -> None:
    store = store_in(tmp_path, StoreLimits(max_bytes=1 << 16))
    for number in range(300):
        store.append(row(number, tokens=60))
    found = segments(tmp_path)
    assert len(found) > 3
    everything = list(store.rows())
    assert store.newest(5) == everything[-5:]
    assert store.newest(10_000) == everything
    found[0].write_bytes(b"damage")
    assert store.newest(40) == everything[-40:]


def test_a_file_cut_off_at_any_byte_keeps_every_row_before_it(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(3):
        store.append(row(number))
    store.close()
    (path,) = segments(tmp_path)
    content = path.read_bytes()
    size = len(content) // 3
    for length in range(len(content)):
        path.write_bytes(content[:length])
        damage = Damage()
        assert list(store.rows(damage=damage)) == [row(each) for each in range(length // size)]
        assert damage == Damage(0, int(length % size > 0))
    again = store_in(tmp_path)  # the next process writes beside the incomplete record, not behind it
    again.append(row(7))
    assert list(again.rows()) == [row(0), row(1), row(7)]


def test_a_flipped_byte_costs_the_rows_that_it_is_in_and_no_other(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for number in range(3):
        store.append(row(number))
    store.close()
    (path,) = segments(tmp_path)
    content = path.read_bytes()
    size = len(content) // 3
    for place in range(size, 2 * size):
        path.write_bytes(content[:place] + bytes([content[place] ^ 0x40]) + content[place + 1 :])
        damage = Damage()
        assert list(store.rows(damage=damage)) == [row(0), row(2)]
        assert damage == Damage(1, 0)


def test_ids_outside_of_the_vocabulary_are_damage(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.append(TrafficRow((1, VOCAB), (2,), time=1e9))
    store.append(TrafficRow((1, 2), (-1,), time=1e9))
    assert store.count().damage == Damage(2, 0)


def test_bytes_are_bounded_and_the_oldest_rows_go_first(tmp_path: Path) -> None:
    limits = StoreLimits(max_bytes=1 << 16)
    store = store_in(tmp_path, limits)
    for number in range(900):
        store.append(row(number, tokens=32))
        assert store.count().bytes <= limits.max_bytes if number % 100 == 0 else True
    kept = list(store.rows())
    assert kept == [row(number, tokens=32) for number in range(900 - len(kept), 900)]
    assert store.count().bytes > 0.9 * limits.max_bytes
    assert not store.append(row(0, tokens=1 << 15))  # larger than the whole store


def test_no_row_stays_on_the_disk_longer_than_the_age_limit(tmp_path: Path) -> None:
    now = [1e9]
    store = store_in(tmp_path, StoreLimits(max_age_s=1600.0), now)
    for number in range(40):
        store.append(row(number, time=now[0]))
        now[0] += 50.0
    times = [kept.time for kept in TrafficStore(tmp_path).rows()]  # a reader shows what is there
    assert min(times) >= now[0] - 50.0 - 1600.0
    assert len(times) >= 28
    now[0] += 3200.0
    assert list(store.rows()) == []
    store.expire()
    assert segments(tmp_path) == []


def test_clearing_deletes_the_rows_of_a_store_that_is_being_written(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.append(row(1))
    TrafficStore(tmp_path).clear()
    store.append(row(2))
    assert list(store.rows()) == [row(2)]


def test_another_models_traffic_is_refused_by_name(tmp_path: Path) -> None:
    store_in(tmp_path)
    with pytest.raises(ConfigError, match=r"traffic of a-model \(f00d\), not of b-model.*--learn-dir"):
        TrafficStore(tmp_path, TargetName("beef", "b-model"), VOCAB)
    with pytest.raises(ConfigError, match="no stored traffic"):
        TrafficStore(tmp_path / "empty")
    (tmp_path / "target.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        store_in(tmp_path)


def test_two_servers_do_not_write_one_store(tmp_path: Path) -> None:
    first, second = store_in(tmp_path), store_in(tmp_path)
    first.append(row(1))
    with pytest.raises(ConfigError, match="Another server"):
        second.append(row(2))
    first.close()
    second.append(row(2))


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    store.append(row(1))
    write = os.write

    def half(file: int, content: bytes | memoryview) -> int:
        monkeypatch.setattr(os, "write", full)
        return write(file, content[: len(content) // 2])

    def full(file: int, content: bytes | memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space"):
        store.append(row(2))
    monkeypatch.setattr(os, "write", write)
    store.append(row(3))
    assert list(store.rows()) == [row(1), row(3)]
    assert store.count().damage == Damage()


def test_a_killed_writer_loses_no_row_that_was_appended(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tests.learn.test_store import row, store_in\n"
        "store = store_in(Path(sys.argv[1]))\n"
        "for number in range(10**9): store.append(row(number)); print(number, flush=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    appended = [process.stdout.readline() for _ in range(50)]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = list(store_in(tmp_path).rows())
    assert appended[-1] == "49\n"
    assert kept == [row(number) for number in range(len(kept))]
    assert len(kept) >= 50
    store_in(tmp_path).append(row(0))  # its lock died with it


def test_salts_are_stored_as_hashes_of_this_store_alone(tmp_path: Path) -> None:
    one, other = store_in(tmp_path / "1"), store_in(tmp_path / "2")
    assert one.hash("") == ""
    assert one.hash("salt") == store_in(tmp_path / "1").hash("salt") != other.hash("salt")
    assert (tmp_path / "1").stat().st_mode & 0o077 == 0


def test_every_prompt_has_one_side_and_sides_have_their_shares() -> None:
    sides = [side_of((number, number // 7, 3)) for number in range(4000)]
    assert sides == [side_of([number, number // 7, 3]) for number in range(4000)]
    for side, share in ((Side.GATE, GATE_SHARE), (Side.STOP, STOP_SHARE)):
        assert sides.count(side) / 4000 == pytest.approx(share, abs=0.02)


def test_a_store_whose_target_cannot_be_read_is_put_aside_so_that_a_server_starts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, target = tmp_path / "traffic", TargetName("f00d", "m")
    for content in ("{", "null", '{"version": 1}'):
        open_store(folder, target, 1000).close()
        (folder / "target.json").write_text(content)
        store = open_store(folder, target, 1000)
        assert list(store.rows()) == []
        assert (tmp_path / "traffic.damaged/target.json").read_text() == content
    assert caplog.text.count("starts empty") == 3
    with pytest.raises(ConfigError, match="not of other"):  # a mistake of the user, not damage
        open_store(folder, TargetName("beef", "other"), 1000)
