"""The law of the reader: what is told token by token is what a plain reading of the whole text gives.

The plain reading below knows no pieces: it writes the whole answer down, with one letter that no text can have for each
token that is not shown, and takes it apart with a regular expression.
"""

from __future__ import annotations

import itertools
import re

from hypothesis import example, given, settings
from hypothesis import strategies as st

from readers import reader_of
from weft.model.resolve import TINY_HYBRID
from weft.text.reasoning import Markers
from weft.text.stream import StreamReader
from weft.text.tokenizer import Detokenizer, Tokenizer
from weft.text.types import Delta, Reasoning, Text

TOKENIZER = Tokenizer(TINY_HYBRID)
THINK = Markers("<think>", "</think>")
MARKS = frozenset(map(TOKENIZER.id_of, THINK))
BREAK = "\ud800"  # a token that is not shown: no marker reaches over it
BEGINS = re.compile(r"[ \t\n\r\v\f]{0,32}<think>")


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def letter_by_letter(text: str) -> list[int]:
    return [token for letter in text for token in encode(letter)]


WORDS = [
    "<think>",
    "</think>",
    "\n",
    "\n\n",
    " ",
    "STOP",
    "ST",
    "OP",
    "🙂",
    "👩‍👩‍👧",
    "漢字",
    "e\u0301",
    "Hello there",
    "<|im_start|>",
    "<th",
]
STOPS = st.lists(st.sampled_from(["STOP", "OP", "\n\n", "🙂", "</think>", "👩‍👩‍👧!", "lo"]), max_size=3, unique=True).map(tuple)
WRITTEN = st.one_of(
    st.sampled_from(WORDS).map(encode),
    st.sampled_from(["<think>", "</think>", "STOP", "🙂"]).map(letter_by_letter),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), max_size=6).map(encode),
)
ANY = st.one_of(WRITTEN, st.integers(0, TOKENIZER.inner.get_vocab_size() + 1).map(lambda token: [token]))


def joined(parts: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def whole(ids: list[int]) -> str:
    """The text at once, with a BREAK for each token that is not shown."""
    detokenizer = Detokenizer(TOKENIZER, shown=MARKS)
    return "".join(BREAK if token in detokenizer.skipped else detokenizer.feed(token) for token in ids)


def sections(text: str, opened: bool) -> tuple[str, str]:
    """The thought, and the answer."""
    begin = BEGINS.match(text)
    if not begin and not opened:
        return "", text.replace(BREAK, "")
    thought, closed, answer = text[begin.end() if begin else 0 :].partition("</think>")
    thought, answer = thought.replace(BREAK, "").lstrip("\n"), answer.replace(BREAK, "").lstrip("\n")
    return thought.rstrip("\n") if closed else thought, answer


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def expected(ids: list[int], opened: bool, stops: tuple[str, ...]) -> tuple[str, str, str | None]:
    thought, answer = sections(whole(ids), opened)
    return thought, *cut(answer, stops)


def fed(reader: StreamReader, ids: list[int]) -> list[Delta]:
    return [delta for token in ids for delta in reader.feed(token)] + reader.finish()


def told(deltas: list[Delta], kind: type[Text] | type[Reasoning]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, kind))


@settings(max_examples=400)
@given(st.lists(ANY, max_size=14).map(joined), st.booleans(), STOPS, st.booleans())
@example(joined([encode("</th"), encode("<think>"), encode("ink>")]), True, (), False)
@example(joined([encode("</think>\n"), encode("</think>\n"), encode("a")]), True, (), True)
def test_any_ids_give_what_a_plain_reading_of_the_whole_gives(
    ids: list[int], opened: bool, stops: tuple[str, ...], logprobs: bool
) -> None:
    reader = reader_of(TOKENIZER, stops=stops, markers=THINK, opened=opened, logprobs=logprobs)

    deltas = fed(reader, ids)

    assert (told(deltas, Reasoning), told(deltas, Text), reader.stopped) == expected(ids, opened, stops)
    assert logprobs or Text("") not in deltas
    assert Reasoning("") not in deltas


@settings(max_examples=300)
@given(st.lists(WRITTEN, max_size=14).map(joined), st.integers(0, 3), st.booleans(), STOPS)
def test_no_piece_has_half_a_character_also_where_the_answer_is_cut(
    ids: list[int], num_cut: int, opened: bool, stops: tuple[str, ...]
) -> None:
    ids = ids[: len(ids) - num_cut]

    deltas = fed(reader_of(TOKENIZER, stops=stops, markers=THINK, opened=opened), ids)

    for delta in deltas:
        assert isinstance(delta, Text | Reasoning)
        assert "\ufffd" not in delta.text
        delta.text.encode()  # a lone surrogate would raise


@settings(max_examples=300)
@given(st.lists(WRITTEN, max_size=14).map(joined), STOPS)
def test_the_tokens_told_are_those_that_end_in_the_answer_told(ids: list[int], stops: tuple[str, ...]) -> None:
    deltas = fed(reader_of(TOKENIZER, stops=stops, logprobs=True), ids)

    answer = told(deltas, Text).encode()
    shown = [token for token in ids if token not in TOKENIZER.special_ids]
    ends = itertools.accumulate(len(TOKENIZER.token_bytes(token)) for token in shown)
    told_tokens = [token for delta in deltas if isinstance(delta, Text) for token in delta.tokens]
    assert [token.id for token in told_tokens] == [token for token, end in zip(shown, ends, strict=True) if end <= len(answer)]
    assert answer.startswith(b"".join(token.bytes for token in told_tokens))


@settings(max_examples=200)
@given(st.lists(WRITTEN, max_size=5).map(joined), st.lists(WRITTEN, max_size=8).map(joined), st.booleans())
def test_the_tokens_told_after_thinking_are_the_answers(thought: list[int], answer: list[int], opens: bool) -> None:
    thought = [token for token in thought if token not in MARKS]
    answer = [token for token in answer if token not in MARKS]
    if "</think>" in whole(thought) or "<think>" in whole(thought):
        return
    begin = [] if opens else encode("<think>")

    deltas = fed(
        reader_of(TOKENIZER, markers=THINK, opened=opens, logprobs=True), [*begin, *thought, *encode("</think>\n\n"), *answer]
    )

    shown = [token for token in answer if token not in TOKENIZER.special_ids]
    while shown and not TOKENIZER.token_text(shown[0]).strip("\n"):
        del shown[0]
    assert [token.id for delta in deltas if isinstance(delta, Text) for token in delta.tokens] == shown
