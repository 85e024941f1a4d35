"""The file of past responses: it survives a restart, and damaged files are refused."""

from __future__ import annotations

import contextlib
import tracemalloc
import zipfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.core.trees import DraftPlan
from paceline.draft.lookup.ngram_index import GAP
from paceline.draft.lookup.suffix import SuffixDrafter
from paceline.draft.lookup.suffix_store import fingerprint_of
from paceline.errors import ConfigError
from tests.draft.requests import chains, make_request
from tests.toy import VOCAB, ToyTokenizer, toy_engine


class OtherTokenizer(ToyTokenizer):
    def token_bytes(self, token_id):
        return b"other" if token_id == 70 else super().token_bytes(token_id)


@pytest.fixture
def load(tmp_path):
    """Load a drafter whose cache is in a file; `load.path` is the file."""

    def load(tokenizer=None, cached=100, vocab_size=VOCAB, path=None, share="responses"):
        options = SuffixDrafter.Options(
            suffix_cache_path=str(path or load.path),
            suffix_decoding_max_cached_requests=cached,
            share_suffix_cache=share,
        )
        target = SimpleNamespace(
            tokenizer=tokenizer or ToyTokenizer(), config=SimpleNamespace(vocab_size=vocab_size)
        )
        return SuffixDrafter.load(options, target)

    load.path = tmp_path / "past.npz"
    return load


@pytest.fixture
def saved(load):
    """A file with 20 different responses."""
    drafter = load()
    for number in range(20):
        drafter.forget(make_request([1, 2, 3], response(number)))
    drafter.memory.save()
    return load.path


def response(number):
    return [token * (number + 2) % VOCAB for token in range(30, 60)]


def draft(drafter, ids, salt=""):
    return chains(drafter.propose([make_request(ids, salt=salt)], [DraftPlan("suffix", 4)]))[0]


def test_what_was_learned_survives_a_restart(load, saved):
    drafter = load()
    for number in range(20):
        assert draft(drafter, response(number)[:20]) == response(number)[20:24]


def test_a_smaller_cache_takes_the_newest_responses(load, saved):
    drafter = load(cached=2)
    assert draft(drafter, response(19)[:20]) == response(19)[20:24]
    assert draft(drafter, response(18)[:20]) == response(18)[20:24]
    assert len(drafter._past) == 2


def test_what_has_a_salt_is_not_written(load):
    drafter = load()
    drafter.forget(make_request([1], response(0), salt="a secret of ann's"))
    drafter.forget(make_request([1], response(1)))
    drafter.forget(make_request([1], response(2), salt="bob"))
    drafter.memory.save()
    with np.load(load.path) as file:
        arrays = dict(file)
    assert arrays["tokens"].tolist() == [*response(1), GAP]
    assert arrays["sizes"].tolist() == [31]
    assert b"ann" not in load.path.read_bytes()
    again = load()
    assert draft(again, response(1)[:20]) == response(1)[20:24]
    for number, salt in ((0, "a secret of ann's"), (0, ""), (1, "bob"), (2, "bob")):
        assert draft(again, response(number)[:20], salt) == []


def test_other_users_of_the_machine_cannot_read_it(saved):
    assert saved.stat().st_mode & 0o077 == 0


def test_a_file_with_prompts_is_taken_only_where_prompts_are_kept(load):
    drafter = load(share="prompts")
    drafter.forget(make_request(response(0), [1, 2, 3, 4, 5]))
    drafter.memory.save()
    assert draft(load(share="prompts"), response(0)) == [1, 2, 3, 4]
    with pytest.raises(
        ConfigError, match=r"has ends of prompts too.*Use share_suffix_cache 'prompts', delete"
    ):
        load()


def test_a_file_without_prompts_is_taken_where_prompts_are_kept(load, saved):
    drafter = load(share="prompts")
    assert draft(drafter, response(3)[:20]) == response(3)[20:24]


def test_a_file_of_the_first_version_had_prompts(load):
    np.savez(
        load.path,
        version=np.array(1),
        fingerprint=np.array(fingerprint_of(ToyTokenizer())),
        sizes=np.array([31]),
        tokens=np.array([*response(0), GAP], dtype=np.int32),
    )
    assert draft(load(share="prompts"), response(0)[:20]) == response(0)[20:24]
    with pytest.raises(ConfigError, match="has ends of prompts too"):
        load()


def test_saving_twice_or_an_empty_cache_is_fine(load):
    drafter = load()
    drafter.save()
    drafter.save()
    assert len(load()._past) == 0
    assert [path.name for path in load.path.parent.iterdir()] == [load.path.name]


def test_without_a_path_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    SuffixDrafter(SuffixDrafter.Options()).memory.save()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_tokenizer_is_refused(load, saved):
    with pytest.raises(ConfigError, match="another tokenizer"):
        load(OtherTokenizer())


@pytest.fixture
def begins_empty(load, caplog):
    """Asserts that the file is of no use: that is told, it is kept aside, and the cache begins empty."""

    def begins_empty():
        content = load.path.read_bytes()
        caplog.clear()
        drafter = load()
        assert len(drafter._past) == 0
        (message,) = caplog.messages
        assert str(load.path) in message
        assert "kept as past.npz.damaged" in message
        assert not load.path.exists()
        assert load.path.with_name("past.npz.damaged").read_bytes() == content
        drafter.memory.save()
        assert len(load()._past) == 0

    return begins_empty


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, -1])
def test_a_truncated_file_is_kept_aside(saved, begins_empty, cut):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    begins_empty()


def test_a_flipped_bit_is_noticed(saved, begins_empty):
    content = bytearray(saved.read_bytes())
    content[content.index(b"tokens.npy") + 300] ^= 1
    saved.write_bytes(content)
    begins_empty()


def test_other_files_are_kept_aside(load, begins_empty):
    for content in (b"", b"hello", b"PK\x03\x04", bytes(range(256)) * 9):
        load.path.write_bytes(content)
        begins_empty()
    np.savez(load.path, a=np.zeros(3, dtype=int))
    begins_empty()
    np.savez(load.path, version=np.array(99), fingerprint="", sizes=[1], tokens=[1])
    begins_empty()


@pytest.mark.parametrize("wrong", ["sizes", "token", "pickle", "nan", "sum", "compressed"])
def test_contents_that_do_not_fit_are_kept_aside(load, saved, begins_empty, wrong):
    with np.load(saved) as file:
        arrays = dict(file)
    if wrong == "sizes":
        arrays["sizes"][0] += 1
    elif wrong == "token":
        arrays["tokens"][5] = VOCAB
    elif wrong == "nan":  # is neither below 0 nor beyond the vocabulary
        arrays["tokens"] = np.full(len(arrays["tokens"]), np.nan)
    elif wrong == "sum":  # of sizes that overflow to the right one
        total = len(arrays["tokens"])
        arrays["sizes"] = np.array([2**62, 2**62, 2**62, 2**62 - 1, total + 1 - 10, 10], dtype=np.int64)
        assert arrays["sizes"].sum() == total
    elif wrong == "pickle":
        arrays["tokens"] = np.array([object()], dtype=object)
    (np.savez_compressed if wrong == "compressed" else np.savez)(saved, **arrays)
    begins_empty()


@pytest.mark.parametrize("claimed", ["(4000000000000,)", "(-1,)", "(99, 99)", "((((((1,))))))"])
def test_memory_is_not_allocated_by_a_headers_claim(load, saved, begins_empty, claimed):
    with zipfile.ZipFile(saved) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    content = members["tokens.npy"]
    shape = content[content.index(b"(") : content.index(b")") + 1]
    room = content.index(b"\n") - content.index(b"}")
    claim = claimed.encode()
    padded = b"}" + b" " * (room - 1 + len(shape) - len(claim))
    members["tokens.npy"] = content.replace(shape, claim, 1).replace(b"}" + b" " * (room - 1), padded, 1)
    with zipfile.ZipFile(saved, "w") as archive:
        for name, member in members.items():
            archive.writestr(name, member)
    tracemalloc.start()
    begins_empty()
    assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=8))
def test_changed_bytes_are_read_or_kept_aside(load, saved, changes):
    sound = saved.read_bytes()
    content = bytearray(sound)
    for place, byte in changes:
        content[place % len(content)] = byte
    saved.write_bytes(content)
    with contextlib.suppress(ConfigError):  # of another tokenizer, if the fingerprint was hit
        assert len(load()._past) in (0, 20)
    saved.write_bytes(sound)


def test_a_kill_while_it_is_written_leaves_the_old_file(load, saved, monkeypatch):
    before = saved.read_bytes()
    drafter = load()

    def killed(path, target):
        raise KeyboardInterrupt

    with monkeypatch.context() as killing:
        killing.setattr(Path, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            drafter.save()
    assert saved.read_bytes() == before


def test_a_path_that_cannot_be_written_is_reported_at_the_start(load, tmp_path):
    for path in (tmp_path / "missing" / "past.npz", tmp_path):
        with pytest.raises(ConfigError, match="cannot be written"):
            load(path=path)


def test_a_disk_that_is_full_at_the_end_costs_only_what_was_to_be_kept(load, saved, monkeypatch, caplog):
    """The engine closes all the same, and the old file stays."""
    before = saved.read_bytes()
    engine = toy_engine(drafter=load(), budget=4)

    def fail(*arguments, **arrays):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", fail)
    engine.close()
    assert "No space left" in caplog.messages[-1]
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    assert saved.read_bytes() == before
