"""The file of the suffix cache: it survives a restart, and nothing wrong is taken from it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from paceline.draft.matching import GAP
from paceline.draft.suffix import SuffixDrafter
from paceline.draft.suffix_store import fingerprint_of
from paceline.draft.trees import DraftPlan
from paceline.errors import ConfigError
from tests.draft.requests import chains, make_request
from tests.toy import VOCAB, ToyTokenizer


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
    drafter.close()
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
    drafter.close()
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
    drafter.close()
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
    SuffixDrafter(SuffixDrafter.Options()).close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_another_tokenizer_is_refused(load, saved):
    with pytest.raises(ConfigError, match="another tokenizer"):
        load(OtherTokenizer())


@pytest.mark.parametrize("cut", [0, 1, 100, 0.5, -1])
def test_a_truncated_file_is_refused(load, saved, cut):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * cut) if isinstance(cut, float) else cut])
    with pytest.raises(ConfigError, match="Delete it"):
        load()


def test_a_flipped_bit_is_refused(load, saved):
    content = bytearray(saved.read_bytes())
    content[content.index(b"tokens.npy") + 300] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ConfigError, match="Delete it"):
        load()


def test_other_files_are_refused(load):
    for content in (b"", b"hello", b"PK\x03\x04"):
        load.path.write_bytes(content)
        with pytest.raises(ConfigError, match="Delete it"):
            load()
    np.savez(load.path, a=np.zeros(3))
    with pytest.raises(ConfigError, match="Delete it"):
        load()
    np.savez(load.path, version=np.array(99), fingerprint="", sizes=np.zeros(0), tokens=np.zeros(0))
    with pytest.raises(ConfigError, match="version 99"):
        load()


@pytest.mark.parametrize("wrong", ["sizes", "token", "pickle"])
def test_contents_that_do_not_fit_are_refused(load, saved, wrong):
    with np.load(saved) as file:
        arrays = dict(file)
    if wrong == "sizes":
        arrays["sizes"][0] += 1
    elif wrong == "token":
        arrays["tokens"][5] = VOCAB
    else:
        arrays["tokens"] = np.array([object()], dtype=object)
    np.savez(saved, **arrays)
    with pytest.raises(ConfigError, match="Delete it"):
        load()


def test_a_path_that_cannot_be_written_is_an_error_at_the_end(load, tmp_path):
    drafter = load(path=tmp_path / "missing" / "past.npz")
    with pytest.raises(ConfigError, match="cannot be written"):
        drafter.save()
