"""From ids to deltas, by example: thinking, markers that are tokens, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from readers import reader_of
from weft.ipc.messages import TokenLogprob
from weft.model.resolve import TINY_HYBRID
from weft.text.reasoning import KNOWN, Markers, ReasoningSplitter, find_markers, opens_in
from weft.text.stream import StreamReader
from weft.text.template import ChatTemplate
from weft.text.tokenizer import Tokenizer
from weft.text.tools import CallReader, HarmonyReader, read_tools
from weft.text.tools.families import FAMILIES
from weft.text.types import CallArguments, CallClosed, CallOpened, ContentDelta, Delta, Reasoning, Text, Token

TOKENIZER = Tokenizer(TINY_HYBRID)
THINK = Markers("<think>", "</think>")
SPELLED = Markers("[THINK]", "[/THINK]")  # no tokens of the tiny vocabulary
CHANNEL = Markers("<|channel>thought", "<channel|>")


def encode(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def read(reader: StreamReader, ids: list[int]) -> list[Delta]:
    return [delta for token in ids for delta in reader.feed(token)] + reader.finish()


def told(deltas: list[Delta]) -> tuple[str, str]:
    """Reasoning and answer."""
    thought = "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))
    return thought, "".join(delta.text for delta in deltas if isinstance(delta, Text))


def tokens(deltas: list[Delta]) -> list[Token]:
    return [token for delta in deltas if isinstance(delta, Text) for token in delta.tokens]


def with_special(folder: Path, *texts: str) -> Tokenizer:
    """The tiny tokenizer with more special tokens."""
    inner: Any = tokenizers.Tokenizer.from_file(str(TINY_HYBRID / "tokenizer.json"))
    inner.add_special_tokens(list(texts))
    inner.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def test_a_plain_answer_is_told_token_by_token() -> None:
    ids = encode("Once upon a time")
    reader = reader_of(TOKENIZER)

    pieces = [reader.feed(token) for token in ids]

    assert pieces == [[Text(TOKENIZER.token_text(token))] for token in ids]
    assert reader.finish() == []


def test_an_answer_cut_inside_a_character_has_no_replacement_character() -> None:
    assert told(read(reader_of(TOKENIZER), encode("ok 🙂")[:-1])) == ("", "ok ")


@pytest.mark.parametrize(
    ("text", "opened", "thought", "answer"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nHi", False, "hm\n\nso", "Hi"),
        ("\nhm\n</think>\n\nHi", True, "hm", "Hi"),
        (" \n<think>hm</think>Hi", False, "hm", "Hi"),
        ("<think>\nhm</think>Hi", True, "hm", "Hi"),
        ("\n\nHi", False, "", "\n\nHi"),
        (" " * 33 + "<think>", False, "", " " * 33),
        ("no end\n", True, "no end\n", ""),
        ("no end </thi", True, "no end </thi", ""),
        ("<think>\n\n</think>\n\n", False, "", ""),
        ("\n \n", False, "", "\n \n"),
    ],
)
def test_thinking_is_told_apart_without_markers_and_their_line_breaks(text: str, opened: bool, thought: str, answer: str) -> None:
    assert told(read(reader_of(TOKENIZER, markers=THINK, opened=opened), encode(text))) == (thought, answer)


def test_markers_that_are_no_tokens_are_found_in_the_text_however_it_is_cut() -> None:
    text = "[THINK]\nhm [/THIN\n[/THINK]\n\nHi [THINK] there"

    splitter = ReasoningSplitter(SPELLED, opened=False)
    by_letter = [piece for letter in text for piece in splitter.feed(letter)] + splitter.finish()
    by_token = read(reader_of(TOKENIZER, markers=SPELLED), encode(text))

    assert ReasoningSplitter(SPELLED, opened=False, tokenizer=TOKENIZER).marker_tokens == {}
    assert told(by_letter) == told(by_token) == ("hm [/THIN", "Hi [THINK] there")


def test_thinking_opens_again_by_the_token_but_not_by_its_letters() -> None:
    letters = [token for letter in "<think>" for token in encode(letter)]

    by_token = read(reader_of(TOKENIZER, markers=THINK), encode("a <think>hm</think> b"))
    by_letter = read(reader_of(TOKENIZER, markers=THINK), encode("a ") + letters + encode("hm"))

    assert told(by_token) == ("hm", "a  b")
    assert told(by_letter) == ("", "a <think>hm")


def test_a_half_written_marker_before_the_token_is_answer() -> None:
    letters = [token for letter in "<thi" for token in encode(letter)]

    deltas = read(reader_of(TOKENIZER, markers=THINK, logprobs=True), letters + encode("<think>hm</think>Hi"))

    assert told(deltas) == ("hm", "<thiHi")
    assert [token.id for token in tokens(deltas)] == letters + encode("Hi")


def test_a_stray_close_token_and_a_second_open_one_are_dropped() -> None:
    assert told(read(reader_of(TOKENIZER, markers=THINK), encode("Hi</think> there"))) == ("", "Hi there")
    assert told(read(reader_of(TOKENIZER, markers=THINK, opened=True), encode("a<think>b</think>c"))) == ("ab", "c")


def test_an_unfinished_character_does_not_reach_over_a_marker() -> None:
    smile = encode("🙂")

    deltas = read(reader_of(TOKENIZER, markers=THINK, opened=True), [*encode("a"), *smile[:-1], *encode("</think>"), smile[-1]])

    assert told(deltas) == ("a", "\ufffd")


def test_special_marker_tokens_are_heard_though_special_tokens_are_skipped(tmp_path: Path) -> None:
    tokenizer = with_special(tmp_path, "<|channel>", "<channel|>")
    text = "<|channel>thought\nhm<channel|>Hi <|channel>thought\nwait<channel|>you<|im_end|>"

    reader = reader_of(tokenizer, markers=CHANNEL)

    assert told(read(reader, encode(text, tokenizer))) == ("hmwait", "Hi you")
    assert told(read(reader_of(tokenizer, markers=CHANNEL), encode("<|channel>other", tokenizer))) == ("", "<|channel>other")


def test_without_markers_thinking_is_part_of_the_answer() -> None:
    assert told(read(reader_of(TOKENIZER), encode("<think>hm</think>Hi"))) == ("", "<think>hm</think>Hi")


def test_tokens_of_the_thinking_are_counted_with_the_one_that_closes_it() -> None:
    thought, answer = encode("\nlet me see"), encode("\n\nHi")
    reader = reader_of(TOKENIZER, markers=THINK, opened=True)

    read(reader, [*thought, *encode("</think>"), *answer])

    assert reader.num_reasoning_tokens == len(thought) + 1


def test_a_stop_string_ends_the_answer_and_what_follows_gives_nothing() -> None:
    reader = reader_of(TOKENIZER, stops=("\nUser:", "END"))

    deltas = read(reader, encode("Hello there\nUser: more"))

    assert told(deltas) == ("", "Hello there")
    assert reader.stopped == "\nUser:"
    assert reader.feed(encode("x")[0]) == []
    assert reader.finish() == []


def test_a_stop_string_is_not_looked_for_in_the_thinking() -> None:
    reader = reader_of(TOKENIZER, stops=("\n\n",), markers=THINK, opened=True)

    deltas = read(reader, encode("one\n\ntwo\n</think>\n\nHi\n\nmore"))

    assert told(deltas) == ("one\n\ntwo", "Hi")
    assert reader.stopped == "\n\n"


def test_what_a_stop_held_back_is_told_at_the_end() -> None:
    reader = reader_of(TOKENIZER, stops=("STOP",))

    assert told(read(reader, encode("go STO"))) == ("", "go STO")
    assert reader.stopped is None


def test_a_stop_string_in_what_was_held_for_a_marker_is_found_at_the_end() -> None:
    reader = reader_of(TOKENIZER, stops=("[TH",), markers=SPELLED, logprobs=True)

    assert read(reader, encode("[THI")) == []
    assert reader.stopped == "[TH"


def test_every_answer_token_is_told_once_with_its_bytes_and_log_probability() -> None:
    ids = encode("Hi 🙂 you")
    reader = reader_of(TOKENIZER, logprobs=True)
    logprobs = [TokenLogprob(token, -0.5 * place) for place, token in enumerate(ids)]

    deltas = [delta for token, logprob in zip(ids, logprobs, strict=True) for delta in reader.feed(token, logprob)]

    assert [token.id for token in tokens(deltas)] == ids
    assert [token.logprob for token in tokens(deltas)] == logprobs
    assert b"".join(token.bytes for token in tokens(deltas)).decode() == "Hi 🙂 you"
    assert reader.finish() == []


def test_tokens_of_thinking_markers_line_breaks_and_stop_are_not_told() -> None:
    reader = reader_of(TOKENIZER, stops=("STOP",), markers=THINK, opened=True, logprobs=True)

    deltas = read(
        reader, [*encode("hm</think>\n\n"), *encode("<|im_start|>"), *encode("Hi you"), *encode("STOP"), *encode("more")]
    )

    assert told(deltas) == ("hm", "Hi you")
    assert [token.id for token in tokens(deltas)] == encode("Hi you")


def test_a_skipped_token_inside_a_character_is_not_told() -> None:
    smile = encode("🙂")

    deltas = read(reader_of(TOKENIZER, logprobs=True), [*smile[:-1], *encode("<|im_start|>"), smile[-1]])

    assert told(deltas) == ("", "🙂")
    assert [token.id for token in tokens(deltas)] == smile


def test_tokens_wait_with_their_text_for_a_stop_string_that_does_not_come() -> None:
    letters = [token for letter in "go STO!" for token in encode(letter)]
    reader = reader_of(TOKENIZER, stops=("STOP",), logprobs=True)

    deltas = read(reader, letters)

    assert [(delta.text, len(delta.tokens)) for delta in deltas if isinstance(delta, Text)] == [
        ("g", 1),
        ("o", 1),
        (" ", 1),
        ("STO!", 4),
    ]


def test_the_tokens_of_an_unfinished_character_are_told_at_the_end_though_it_is_not() -> None:
    ids = encode("🙂")[:-1]

    deltas = read(reader_of(TOKENIZER, logprobs=True), ids)

    assert deltas == [Text("", tuple(Token(token, "\ufffd", TOKENIZER.token_bytes(token)) for token in ids))]
    assert read(reader_of(TOKENIZER, logprobs=True, markers=THINK, opened=True), ids) == []


def test_the_tiny_models_prompt_opens_the_thinking_unless_it_is_switched_off() -> None:
    template = ChatTemplate.of(TINY_HYBRID)
    assert template is not None
    message = {"role": "user", "content": "why <think>"}

    assert opens_in(template.render([message]), THINK)
    assert not opens_in(template.render([message], enable_thinking=False), THINK)
    assert not opens_in(template.render([message], add_generation_prompt=False), THINK)


@pytest.mark.parametrize("markers", KNOWN)
def test_a_template_says_which_markers_it_uses(markers: Markers) -> None:
    assert find_markers("{{ '" + markers.open + "\\n' }}", TOKENIZER) == markers
    assert find_markers("{% if '" + markers.close + "' in text %}", TOKENIZER) == markers


def test_where_the_template_is_silent_the_vocabulary_says_it(tmp_path: Path) -> None:
    vocabulary = {"a": 0, "[/THINK]": 1}
    inner: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))

    assert find_markers("", Tokenizer(tmp_path)) == SPELLED
    assert find_markers("", TOKENIZER) == THINK


def test_a_model_without_thinking_has_no_markers(tmp_path: Path) -> None:
    inner: Any = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.save(str(tmp_path / "tokenizer.json"))

    assert find_markers("{{ messages }}", Tokenizer(tmp_path)) is None


# --- calls

WEATHER = read_tools([{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}])
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome\\n\\n"}}\n</tool_call>'
HERMES = next(family for family in FAMILIES if family.name == "hermes")


def with_calls(**more: Any) -> StreamReader:
    return reader_of(TOKENIZER, calls=CallReader(HERMES, WEATHER, lambda: "call_1"), **more)


def called(deltas: list[Delta]) -> list[Delta]:
    """The deltas with pieces of one kind put together, without tokens."""
    found: list[Delta] = []
    for each in deltas:
        delta, last = replace(each, tokens=()) if isinstance(each, Text) else each, found[-1] if found else None
        if isinstance(delta, Text | Reasoning | CallArguments) and type(last) is type(delta):
            found[-1] = replace(delta, text=last.text + delta.text)
        else:
            found.append(delta)
    return found


CALLED: list[Delta] = [
    CallOpened(0, "call_1", "get_weather"),
    CallArguments(0, '{"city": "Rome\\n\\n"}'),
    CallClosed(0),
]


def test_a_call_is_told_apart_from_thinking_and_text() -> None:
    reader = with_calls(markers=THINK, opened=True)

    deltas = read(reader, encode(f"a <tool_call>?</think>\n\nLet me see.\n{CALL}"))

    assert called(deltas) == [Reasoning("a <tool_call>?"), Text("Let me see."), *CALLED]
    assert reader.num_reasoning_tokens == len(encode("a <tool_call>?</think>"))


def test_what_a_stop_held_back_is_told_before_the_call_and_no_stop_cuts_a_call() -> None:
    reader = with_calls(stops=("see?", "Rome", "}}"))

    assert called(read(reader, encode(f"Let me see\n{CALL}"))) == [Text("Let me see"), *CALLED]
    assert reader.stopped is None


def test_a_stop_string_before_a_call_ends_the_answer() -> None:
    letters = [token for letter in f"Let me {CALL}" for token in encode(letter)]
    for ids in (letters, encode(f"Let me {CALL}")):
        reader = with_calls(stops=("me",))

        assert called(read(reader, ids)) == [Text("Let ")]
        assert reader.stopped == "me"


def test_nothing_found_behind_a_stop_string_in_the_same_piece_is_told() -> None:
    token = encode("x")[0]

    class Burst(CallReader):
        def feed(self, text: str) -> list[ContentDelta]:
            return [Text(f"{text} stop"), CallOpened(0, "call_1", "get_weather"), Text("more")]

    reader = reader_of(TOKENIZER, calls=Burst(HERMES, WEATHER), stops=("stop",))

    assert reader.feed(token) == [Text("x ")]
    assert reader.finish() == []


def test_tokens_are_told_for_the_text_before_a_call_only() -> None:
    deltas = read(with_calls(logprobs=True), encode(f"Let me see.{CALL} done"))

    assert called(deltas) == [Text("Let me see."), *CALLED, Text("done")]
    assert [token.id for token in tokens(deltas)] == encode("Let me see.")


def test_the_tokens_of_markup_that_is_no_call_are_told_with_it() -> None:
    for text in ('a <tool_call>\n{"name": "other"} b', "a \n<tool_"):
        deltas = read(with_calls(logprobs=True), encode(text))

        assert called(deltas) == [Text(text)]
        assert [token.id for token in tokens(deltas)] == encode(text)


def test_special_tokens_around_calls_are_heard_though_others_are_skipped(tmp_path: Path) -> None:
    tokenizer = with_special(tmp_path, "[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    family = next(family for family in FAMILIES if family.name == "mistral")
    shown = frozenset(encode("[TOOL_CALLS][ARGS]", tokenizer))
    ids = encode('[OTHER]Hi[TOOL_CALLS]get_weather[ARGS]{"city": "Rome\\n\\n"}', tokenizer)

    reader = reader_of(tokenizer, calls=CallReader(family, WEATHER, lambda: "call_1"), shown=shown)

    assert called(read(reader, ids)) == [Text("Hi"), *CALLED]


def test_thinking_in_a_channel_of_its_own_is_reasoning_and_is_counted() -> None:
    thought = encode("<|channel|>analysis<|message|>hm")
    ids = [*thought, *encode("<|end|><|start|>assistant<|channel|>final<|message|>Hi")]
    reader = reader_of(TOKENIZER, calls=HarmonyReader(()), logprobs=True)

    deltas = read(reader, ids)

    assert told(deltas) == ("hm", "Hi")
    assert [token.text for token in tokens(deltas)] == ["Hi"]
    assert 0 < reader.num_reasoning_tokens < len(ids) - len(encode("Hi"))
