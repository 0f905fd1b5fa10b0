"""The tokens of forced text: the model's own spelling amid a text, exactly these bytes, and nothing that means more."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from vocabularies import ADDED, BYTES, KINDS, SPECIAL, WORDS, write
from weft.grammar.spelling import MAX_CACHED_LENGTH, Spelling
from weft.vocabulary import Vocabulary

PIECES = ["New", " York", " a", "  ", "\n", "x", '"', "é", "字", "▁", "🙂", *SPECIAL, *ADDED, *WORDS, *BYTES[:3]]
WITH_BYTES = [kind for kind in KINDS if "fallback" in kind or kind in ("llama", "gpt2", "tiktoken", "replace, byte level")]


@cache
def vocabulary(kind: str, normalizer: str = "") -> Vocabulary:
    with TemporaryDirectory() as folder:
        write(kind, Path(folder))
        path = Path(folder) / "tokenizer.json"
        if normalizer:
            inner: Any = tokenizers.Tokenizer.from_file(str(path))
            inner.normalizer = getattr(normalizers, normalizer)()
            inner.save(str(path))
        return Vocabulary(path)


@cache
def spelling(kind: str, normalizer: str = "") -> Spelling:
    known = vocabulary(kind, normalizer)
    size = known.inner.get_vocab_size()
    return Spelling(known, [b"" if token in known.reserved_ids else known.bytes_of[token] for token in range(size)])


def spelled(kind: str, text: str, normalizer: str = "") -> bytes:
    return b"".join(vocabulary(kind, normalizer).bytes_of[token] for token in spelling(kind, normalizer)(text))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WITH_BYTES), st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=8))
def test_tokens_of_any_text_have_its_bytes_and_none_of_them_is_a_marker(kind: str, pieces: list[str]) -> None:
    text = "".join(pieces)

    assert spelled(kind, text) == text.encode()
    assert not vocabulary(kind).reserved_ids & {*spelling(kind)(text)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_spelled_as_the_tokenizer_spells_it_amid_another_text(kind: str) -> None:
    inner = vocabulary(kind).inner
    for text in (" New York", " the end", "x New", " a the No"):
        before, whole = (inner.encode(one, add_special_tokens=False).ids for one in ("x", f"x{text}"))

        assert [*before, *spelling(kind)(text)] == whole


@pytest.mark.parametrize("normalizer", ["NFKC", "Lowercase", "Strip", "StripAccents"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "fallback, metaspace"])
def test_what_a_normalizer_would_change_is_spelled_to_the_letter(kind: str, normalizer: str) -> None:
    for text in (" New York ", "ﬁne ½", "É e\u0301 Ünder", "\n x"):
        assert spelled(kind, text, normalizer) == text.encode()


def test_long_texts_are_spelled_like_short_ones() -> None:
    for kind in WITH_BYTES:
        text = "New York <think> 🙂 " * MAX_CACHED_LENGTH

        assert spelled(kind, text) == text.encode()
