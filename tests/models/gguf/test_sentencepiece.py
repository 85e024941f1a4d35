"""Vocabularies of sentencepiece in GGUF files, as Llama 2, Mistral and Gemma have them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from paceline.errors import UnsupportedModelError
from paceline.models.gguf.reader import read_gguf
from paceline.models.gguf.tokenizer import gguf_tokenizer
from tests.models.strings import varied_strings


def write_sentencepiece(path: Path) -> Path:
    """A small vocabulary with scores and byte tokens, as a GGUF file."""
    words = [
        "▁",
        "▁t",
        "▁the",
        "he",
        "in",
        "ing",
        "▁a",
        "er",
        "re",
        "th",
        "the",
        "ab",
        "abc",
        "bc",
        "▁▁",
        "bb",
    ]
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters, "[INST]"]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words) + len(letters))] + [0.0]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters)), 3]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_sentencepiece_ids_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    path = write_sentencepiece(tmp_path / "spm.gguf")
    ours = gguf_tokenizer(read_gguf(path))
    architecture, vocabulary, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, vocabulary)
    for text in [*varied_strings(400), "the there abc abbc [INST] the thing[INST]  other"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_sentencepiece_adds_the_begin_token_and_spells_bytes(tmp_path: Path) -> None:
    ours = gguf_tokenizer(read_gguf(write_sentencepiece(tmp_path / "spm.gguf")))
    ids = ours.encode("the ü")
    assert ids[0] == ours.bos_id == 1
    assert b"".join(ours.token_bytes(token_id) for token_id in ids[1:]).decode() == " the ü"
    assert ours.decode(ids) == "the ü"


def test_sentencepiece_without_a_space_before_the_text(tmp_path: Path) -> None:
    """As Gemma's files ask for."""
    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    file.metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = gguf_tokenizer(file)
    ids = ours.encode("the the")
    assert b"".join(ours.token_bytes(token_id) for token_id in ids[1:]) == b"the the"
    assert ours.decode(ids) == "the the"


def test_gemma_4_merges_pieces_in_the_order_of_the_file(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    merges = ["t h", "th e", "▁ the", "▁ ▁", "a b", "b c", "i n", "in g"]
    file.metadata.update({"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges})
    file.metadata["tokenizer.ggml.add_space_prefix"] = False
    ours = gguf_tokenizer(file)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    vocabulary = {str(token): number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    theirs = GemmaTokenizer(vocabulary, pairs, bos_token="<s>", eos_token="</s>", pad_token="<unk>")
    for text in [*varied_strings(200), "the there  abc thing\n\n other"]:
        ids = ours.encode(text, add_special_tokens=False)
        if 0 not in ids and "[INST]" not in text:  # control tokens are another matter
            assert ids == theirs.encode(text, add_special_tokens=False), repr(text)
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.encode("the")[0] == 1


def test_sentencepiece_without_byte_tokens_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write_sentencepiece(tmp_path / "spm.gguf"))
    file.metadata["tokenizer.ggml.tokens"][5] = "other"  # type: ignore[index]
    with pytest.raises(UnsupportedModelError, match="byte tokens"):
        gguf_tokenizer(file)
