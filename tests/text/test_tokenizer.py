"""Tokens and their exact bytes, and the law of the detokenizer: the pieces are the whole, with three kinds of vocabulary."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models

from weft.errors import UnsupportedModel
from weft.model.resolve import TINY_HYBRID
from weft.text.tokenizer import Detokenizer, Tokenizer

BYTE_LEVEL = Tokenizer(TINY_HYBRID)
SPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
UNSPACED = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
UNFINISHED = ["", "\ufffd", "\ufffd\ufffd"]  # how the library shows the bytes that we drop at the end
METASPACE = decoders.Metaspace()
WORDS = ["▁", "▁▁", "▁hello", "▁wor", "ld", "a", "é", "▁字", "\ufffd"]


@functools.cache
def spelled(byte: int) -> int:
    """The tiny model's token for one byte."""
    return next(token for token in range(256) if BYTE_LEVEL.token_bytes(token) == bytes([byte]))


@functools.cache
def sentencepiece(decoder: Any) -> Tokenizer:
    """A vocabulary as sentencepiece writes it: ▁ for a space, and a token for each byte."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    vocabulary = {text: number for number, text in enumerate(texts)}
    inner: Any = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoder
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    inner.add_tokens([AddedToken("▁▁▁", normalized=False), AddedToken("<é>", normalized=False)])
    return saved(inner)


def saved(inner: Any) -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        inner.save(f"{folder}/tokenizer.json")
        return Tokenizer(Path(folder))


def streamed(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    pieces = []
    for token in ids:
        pieces.append(detokenizer.feed(token))
        assert len(detokenizer.unfinished) <= 3
    assert tokenizer.decode(ids, skip_special_tokens=skip_special_tokens) == "".join(pieces)
    return pieces


@settings(max_examples=200)
@given(st.lists(st.integers(0, BYTE_LEVEL.inner.get_vocab_size() + 2), max_size=30), st.booleans())
def test_any_byte_level_ids_come_out_as_the_library_decodes_them_up_to_an_unfinished_end(ids: list[int], skip: bool) -> None:
    text = "".join(streamed(BYTE_LEVEL, ids, skip))

    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert BYTE_LEVEL.inner.decode(ids, skip_special_tokens=skip) in [text + end for end in UNFINISHED]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0x00, 0x41, 0x80, 0xA0, 0xBF, 0xC2, 0xE2, 0x82, 0xED, 0xF0, 0x9F, 0xF4, 0xFF]), max_size=12))
def test_broken_bytes_come_out_as_the_library_decodes_them_up_to_an_unfinished_end(data: list[int]) -> None:
    ids = [spelled(byte) for byte in data]

    text = "".join(streamed(BYTE_LEVEL, ids))

    assert BYTE_LEVEL.inner.decode(ids) in [text + end for end in UNFINISHED]


@settings(max_examples=100)
@given(
    st.sampled_from([SPACED, UNSPACED]),
    st.lists(st.sampled_from([*WORDS, "<s>", "▁▁▁", "</s>"]), max_size=12),
    st.booleans(),
)
def test_sentencepiece_pieces_are_what_the_library_decodes_also_at_the_first_space(
    decoder: Any, words: list[str], skip: bool
) -> None:
    tokenizer = sentencepiece(decoder)
    ids = [tokenizer.inner.token_to_id(word) for word in words]

    text = "".join(streamed(tokenizer, ids, skip))

    assert text == tokenizer.inner.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100)
@given(st.text(max_size=12), st.sampled_from([SPACED, UNSPACED]))
def test_characters_spelled_in_byte_tokens_are_whole(text: str, decoder: Any) -> None:
    tokenizer = sentencepiece(decoder)
    ids = [tokenizer.inner.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]

    pieces = streamed(tokenizer, ids)

    assert "".join(pieces) == tokenizer.inner.decode(ids)
    assert "\ufffd" in text or "\ufffd" not in "".join(pieces)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 300), max_size=20), st.sampled_from([SPACED, UNSPACED, METASPACE]))
def test_any_sentencepiece_ids_come_out_the_same_in_pieces_and_whole(ids: list[int], decoder: Any) -> None:
    tokenizer = sentencepiece(decoder)

    assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_a_metaspace_vocabulary_drops_one_space_at_the_beginning() -> None:
    tokenizer = sentencepiece(METASPACE)
    ids = [tokenizer.inner.token_to_id(word) for word in ("▁hello", "▁wor", "ld")]

    assert streamed(tokenizer, ids) == ["hello", " wor", "ld"]
    assert streamed(tokenizer, [tokenizer.inner.token_to_id("▁▁"), *ids]) == [" ", " hello", " wor", "ld"]


def test_a_broken_run_of_byte_tokens_does_not_take_back_what_was_told() -> None:
    tokenizer = sentencepiece(SPACED)
    ids = [tokenizer.inner.token_to_id(word) for word in ("<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "a")]

    assert streamed(tokenizer, ids) == ["", "", "€", "", "\ufffda"]


def test_stray_bytes_are_told_at_once_and_hold_nothing_up() -> None:
    ids = [spelled(0x80)] * 50 + BYTE_LEVEL.encode("hello", add_special_tokens=False)

    assert streamed(BYTE_LEVEL, ids)[:50] == ["\ufffd"] * 50


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    ids = BYTE_LEVEL.encode("ok 🙂", add_special_tokens=False)

    assert "".join(streamed(BYTE_LEVEL, ids[:-1])) == "ok "


def test_a_replacement_character_that_the_model_wrote_is_kept() -> None:
    ids = BYTE_LEVEL.encode("a\ufffd", add_special_tokens=False)

    assert "".join(streamed(BYTE_LEVEL, ids)) == "a\ufffd"


@pytest.mark.parametrize("text", ["Hello, wide world", "漢字 🙂", "\x00\x7f\xad\u0100", "\t\n"])
def test_the_bytes_of_a_texts_tokens_are_its_bytes(text: str) -> None:
    ids = BYTE_LEVEL.encode(text, add_special_tokens=False)

    assert b"".join(BYTE_LEVEL.token_bytes(token) for token in ids) == text.encode()


@pytest.mark.parametrize(
    ("written", "data"),
    [("▁hello", b" hello"), ("<0xAB>", b"\xab"), ("<s>", b"<s>"), ("▁▁▁", b"   "), ("<é>", "<é>".encode()), ("é", "é".encode())],
)
def test_a_sentencepiece_token_has_the_bytes_it_stands_for(written: str, data: bytes) -> None:
    tokenizer = sentencepiece(SPACED)
    token = tokenizer.id_of(written)
    assert token is not None

    assert tokenizer.token_bytes(token) == data
    assert tokenizer.token_text(token) == data.decode(errors="replace")


def test_an_added_token_is_its_own_text_even_where_its_letters_could_be_bytes() -> None:
    inner: Any = tokenizers.Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    inner.add_tokens([AddedToken("<é>", normalized=False)])
    tokenizer = saved(inner)

    assert tokenizer.decode([inner.token_to_id("<é>")]) == "<é>"


@pytest.mark.parametrize("token", [-1, 4096, 2**31, 2**32, 2**70])
def test_an_id_nobody_knows_has_no_bytes_and_is_not_remembered(token: int) -> None:
    assert BYTE_LEVEL.token_bytes(token) == b""
    assert BYTE_LEVEL.decode([token]) == ""
    assert token not in BYTE_LEVEL.bytes_of


def test_a_token_is_worked_out_once() -> None:
    token = BYTE_LEVEL.encode("hello", add_special_tokens=False)[0]

    assert BYTE_LEVEL.token_bytes(token) is BYTE_LEVEL.token_bytes(token)


def test_special_tokens_are_known_and_shown_only_when_asked_for() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>hi<think>", add_special_tokens=False)

    assert BYTE_LEVEL.id_of("<|im_start|>") in BYTE_LEVEL.special_ids
    assert BYTE_LEVEL.id_of("<think>") not in BYTE_LEVEL.special_ids
    assert BYTE_LEVEL.id_of("no such token") is None
    assert "".join(streamed(BYTE_LEVEL, ids)) == "hi<think>"
    assert "".join(streamed(BYTE_LEVEL, ids, skip_special_tokens=False)) == "<|im_start|>hi<think>"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Strip(" ", 2, 0)])
def test_a_decoder_that_can_not_be_followed_exactly_is_refused_by_name(decoder: Any) -> None:
    inner: Any = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    if decoder is not None:
        inner.decoder = decoder

    with pytest.raises(UnsupportedModel, match=type(decoder).__name__.removesuffix("Type")):
        saved(inner)


def test_a_limit_in_the_tokenizers_file_does_not_cut_a_prompt(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    inner.enable_truncation(4)
    inner.save(str(tmp_path / "tokenizer.json"))

    ids = Tokenizer(tmp_path).encode("Once upon a time there was a little girl", add_special_tokens=False)

    assert ids == Tokenizer(TINY_HYBRID).encode("Once upon a time there was a little girl", add_special_tokens=False)
    assert len(ids) > 4


@settings(max_examples=200)
@given(st.text("ab é🙂字\n.<|im_end|>", max_size=40), st.data())
def test_an_offset_becomes_the_number_of_tokens_that_end_there_or_before(text: str, data: st.DataObject) -> None:
    offsets = data.draw(st.lists(st.integers(0, len(text)), max_size=4))
    ids, counts = BYTE_LEVEL.encode_with_offsets(text, offsets)
    lengths = [len(BYTE_LEVEL.token_bytes(token)) for token in ids]

    assert ids == BYTE_LEVEL.encode(text, add_special_tokens=False)
    for offset, count in zip(offsets, counts, strict=True):
        limit = len(text[:offset].encode())
        assert sum(lengths[:count]) <= limit
        assert count == len(ids) or sum(lengths[: count + 1]) > limit


def test_offsets_are_right_in_a_vocabulary_of_words_and_byte_tokens() -> None:
    tokenizer = sentencepiece(SPACED)
    ids, counts = tokenizer.encode_with_offsets("ld<s>ald", [0, 2, 5, 6, 7, 8])

    assert [tokenizer.token_text(token) for token in ids] == ["l", "d", "<s>", "a", "l", "d"]
    assert counts == [0, 2, 3, 4, 5, 6]
