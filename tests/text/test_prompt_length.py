"""Texts that are too long for a context are refused before they are tokenised whole, and no others are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

import weft.model
from weft.errors import ContextTooLong, RequestCancelled
from weft.text.codec import Codec
from weft.text.normalise import least_bytes
from weft.text.prompt_length import PART_CHARACTERS, USUAL_CHARACTERS, LengthBound, LengthCheck
from weft.text.template import LocalTemplates
from weft.text.tokenizer import Tokenizer
from weft.text.types import Conversation, Message

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"
TOKENIZER = Tokenizer(FOLDER)
BOUND = LengthBound(TOKENIZER)


class Counting(Tokenizer):
    """A tokenizer that keeps how many characters it was given."""

    def __init__(self) -> None:
        super().__init__(Path(weft.model.__file__).parent / "tiny-hybrid")
        self.given: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        self.given.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens)


def made(tmp_path: Path, **parts: object) -> Tokenizer:
    inner = Inner(models.BPE({letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    for name, part in parts.items():
        setattr(inner, name, part)
    inner.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


@settings(max_examples=300, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])) | st.text("가ㄱㅏ각\u1100\u1161\u11a8 é́ﬁ", max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_say(text: str) -> None:
    assert len(TOKENIZER.encode(text, add_special_tokens=False)) >= BOUND.least_tokens(text)


def test_a_text_that_is_too_long_by_its_bytes_is_not_tokenised_at_all() -> None:
    tokenizer = Counting()
    assert BOUND.max_token_bytes is not None

    with pytest.raises(ContextTooLong, match=r"resulted in 101 tokens or more\. Please reduce") as caught:
        LengthCheck(tokenizer, BOUND, 100).check("x" * (100 * BOUND.max_token_bytes + 1))

    assert tokenizer.given == []
    assert (caught.value.limit, caught.value.got) == (100, 101)


class Noting(LocalTemplates):
    """Templates that note how often they are rendered."""

    num_renders = 0

    def render(self, source: str, values: Mapping[str, Any]) -> str:
        self.num_renders += 1
        return super().render(source, values)


def test_for_a_message_that_is_too_long_by_its_bytes_no_template_is_run() -> None:
    templates = Noting()
    codec = Codec(FOLDER, runner=templates)
    check, num_renders = codec.length_check(100), templates.num_renders
    book = Conversation((Message("user", "words and more " * 10_000),))

    with pytest.raises(ContextTooLong):
        codec.encode(book, check=check)

    assert templates.num_renders == num_renders


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["word", " ", "\n", "\\", "\\n", "\\u000a", "/think", "/no_think", "think", "é"]), max_size=40))
def test_no_message_takes_fewer_bytes_of_a_prompt_than_is_said_before_it_is_written(parts: list[str]) -> None:
    message = Message("user", "".join(parts))
    written = " ".join("".join(parts).replace("/no_think", "").replace("/think", "").split())

    assert least_bytes(message) <= len(written.encode())


def test_a_text_that_is_likely_too_long_is_counted_no_further_than_the_context() -> None:
    tokenizer, context = Counting(), 60_000
    text = "some words " * 150_000

    with pytest.raises(ContextTooLong, match="tokens or more"):
        LengthCheck(tokenizer, BOUND, context).check(text)

    assert sum(tokenizer.given) < len(text) / 2
    assert max(tokenizer.given) <= PART_CHARACTERS


def test_a_long_text_of_few_tokens_is_let_through() -> None:
    longest = max(TOKENIZER.inner.get_vocab(), key=lambda text: len(TOKENIZER.token_text(TOKENIZER.id_of(text) or 0)))
    text = TOKENIZER.token_text(TOKENIZER.id_of(longest) or 0) * 2000
    num_tokens = len(TOKENIZER.encode(text, add_special_tokens=False))

    assert len(text) > USUAL_CHARACTERS * num_tokens
    LengthCheck(TOKENIZER, BOUND, num_tokens).check(text)


def test_an_ordinary_text_is_not_counted_first() -> None:
    tokenizer = Counting()
    LengthCheck(tokenizer, BOUND, 1000).check("words " * 1000)

    assert tokenizer.given == []


def test_a_text_that_nobody_waits_for_is_not_counted_on() -> None:
    tokenizer = Counting()
    check = LengthCheck(tokenizer, LengthBound(tokenizer), 50_000, lambda: len(tokenizer.given) < 2)

    with pytest.raises(RequestCancelled):
        check.check("some words " * 100_000)
    assert len(tokenizer.given) == 2


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": normalizers.Strip()},
        {"normalizer": normalizers.Replace("ab", "")},
        {"normalizer": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex("a+"), "a")])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(False)])},
        {"pre_tokenizer": pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(False)])},
    ],
    ids=["strips", "removes", "collapses", "drops spaces", "splits at spaces"],
)
def test_a_tokenizer_that_may_drop_text_has_no_bound_by_bytes(tmp_path: Path, parts: dict[str, object]) -> None:
    assert LengthBound(made(tmp_path, **parts)).max_token_bytes is None


def test_a_tokenizer_whose_tokens_swallow_spaces_has_no_bound_by_bytes(tmp_path: Path) -> None:
    tokenizer = made(tmp_path)
    tokenizer.inner.add_special_tokens([AddedToken("<end>", rstrip=True)])
    tokenizer.inner.save(str(tmp_path / "tokenizer.json"))

    assert LengthBound(Tokenizer(tmp_path)).max_token_bytes is None


def test_a_tokenizer_of_single_bytes_has_them_as_its_bound(tmp_path: Path) -> None:
    assert LengthBound(made(tmp_path)).max_token_bytes == 2  # of the letter that stands for a byte
    assert LengthBound(made(tmp_path, normalizer=normalizers.NFKC())).max_token_bytes == 8
