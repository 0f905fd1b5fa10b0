"""From ids to deltas, by example: thinking, markers that are tokens, stop strings, log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from readers import reader_of, splitter_of
from weft.errors import UnsupportedParameter
from weft.ipc.messages import TokenLogprob
from weft.model.resolve import TINY_HYBRID
from weft.text.marker_stops import MarkerStops
from weft.text.reasoning import KNOWN, Markers, find_markers, opens_in
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
        (" " * 33 + "<think>", False, "", " " * 33 + "<think>"),
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

    splitter = splitter_of(SPELLED)
    by_letter = [piece for letter in text for piece in splitter.feed(letter)] + splitter.finish()
    by_token = read(reader_of(TOKENIZER, markers=SPELLED), encode(text))

    assert told(by_letter) == told(by_token) == ("hm [/THIN", "Hi [THINK] there")


@pytest.mark.parametrize("markers", [THINK, SPELLED, Markers("<reasoning>", "</reasoning>")])
@pytest.mark.parametrize("way", ["opened", "may open", "off"])
@pytest.mark.parametrize("place", range(6))
def test_reasoning_closes_once_and_later_markers_are_text(markers: Markers, way: str, place: int) -> None:
    """Wherever in the answer they are, as their token or spelled; with log-probabilities their tokens are listed."""
    beginning = {"opened": f"hm{markers.close}", "may open": f"{markers.open}hm{markers.close}", "off": ""}[way]
    words = ["Split ", "at ", "it: ", "x.split(", "'')[1]", " done"]
    words.insert(place, f"{markers.open}{markers.close}{markers.open}" if place % 2 else f"{markers.close}{markers.open}")
    answer = "x" * (way == "off") + "".join(words)
    spelled = [token for letter in answer for token in encode(letter)]

    for ids in (encode(answer), spelled):
        for logprobs in (False, True):
            reader = reader_of(
                TOKENIZER, markers=markers, opened=way == "opened", spec={"may_open": way == "may open"}, logprobs=logprobs
            )
            deltas = read(reader, encode(beginning) + ids)
            assert told(deltas) == ("" if way == "off" else "hm", answer)
            if logprobs:
                assert [token.id for token in tokens(deltas)] == ids


def test_thinking_opens_again_by_the_token_alone_where_the_template_says_so() -> None:
    letters = [token for letter in "<think>" for token in encode(letter)]
    again = {"spec": {"reopens": True}, "reopening": encode("<think>")[0], "markers": THINK}

    by_token = reader_of(TOKENIZER, **again)

    assert told(read(by_token, encode("a <think>hm</think> b<think>x</think>"))) == ("hmx", "a  b")
    assert by_token.num_reasoning_tokens == len(encode("hm")) + len(encode("x"))
    assert told(read(reader_of(TOKENIZER, **again), encode("a ") + letters + encode("hm"))) == ("", "a <think>hm")


def test_a_half_written_marker_before_the_token_is_answer() -> None:
    letters = [token for letter in "<thi" for token in encode(letter)]
    ids = letters + encode("<think>hm</think>Hi")

    deltas = read(reader_of(TOKENIZER, markers=THINK, logprobs=True), ids)

    assert told(deltas) == ("", "<thi<think>hm</think>Hi")
    assert [token.id for token in tokens(deltas)] == ids


def test_a_second_open_marker_within_the_reasoning_is_text() -> None:
    assert told(read(reader_of(TOKENIZER, markers=THINK, opened=True), encode("a<think>b</think>c"))) == ("a<think>b", "c")


def test_an_unfinished_character_does_not_reach_over_a_marker() -> None:
    smile = encode("🙂")

    deltas = read(reader_of(TOKENIZER, markers=THINK, opened=True), [*encode("a"), *smile[:-1], *encode("</think>"), smile[-1]])

    assert told(deltas) == ("a\ufffd", "\ufffd")


def test_special_marker_tokens_are_heard_though_special_tokens_are_skipped(tmp_path: Path) -> None:
    tokenizer = with_special(tmp_path, "<|channel>", "<channel|>")
    text = "<|channel>thought\nhm<channel|>Hi <|channel>thought\nwait<channel|>you"

    reader = reader_of(tokenizer, markers=CHANNEL)

    assert told(read(reader, encode(f"{text}<|im_end|>", tokenizer))) == ("hm", text.partition("<channel|>")[2])
    assert told(read(reader_of(tokenizer, markers=CHANNEL), encode("<|channel>other", tokenizer))) == ("", "<|channel>other")


@pytest.mark.parametrize("gap", ["", "\n", "\n\n", " \n", "<|start|>answer:"])
@pytest.mark.parametrize("answer", ["\nYes", "\n\n- abc", "Yes", "\n", " \n\n\nx", "<|start|>a"])
def test_before_a_grammar_nothing_is_dropped_but_the_gap_that_the_engine_put_there(gap: str, answer: str) -> None:
    for opened in (True, False):
        start = [] if opened else encode("<think>")
        reader = reader_of(TOKENIZER, markers=THINK, opened=opened, before_grammar=True, spec={"gap": gap})

        assert told(read(reader, [*start, *encode("hm</think>"), *encode(gap), *encode(answer)])) == ("hm", answer)


def test_what_a_template_puts_around_the_answer_is_no_part_of_it() -> None:
    markers, frame = Markers("to=self<|message|>", "<|eom|>"), "<|start|>assistant to=user<|message|>"
    spec = {"gap": frame, "begin": " to=user<|message|>"}
    for text, both in (
        (f" to=self<|message|>hm<|eom|>{frame}Hi", ("hm", "Hi")),
        (" to=user<|message|>Hi", ("", "Hi")),
        (" to=user<|message|>", ("", "")),
        ("to=you Hi", ("", "to=you Hi")),
        (f" to=self<|message|>hm<|eom|>Hi{frame}", ("hm", f"Hi{frame}")),
    ):
        letters = [token for letter in text for token in encode(letter)]
        for ids in (encode(text), letters):
            assert told(read(reader_of(TOKENIZER, markers=markers, spec=spec), ids)) == both


def test_without_markers_thinking_is_part_of_the_answer() -> None:
    assert told(read(reader_of(TOKENIZER), encode("<think>hm</think>Hi"))) == ("", "<think>hm</think>Hi")


@pytest.mark.parametrize("markers", [THINK, SPELLED])
@pytest.mark.parametrize("opened", [True, False])
def test_the_tokens_of_the_thinking_are_counted_without_its_markers(markers: Markers, opened: bool) -> None:
    thought, answer = encode("\nlet [/me </see [/"), encode("\n\nHi")
    reader = reader_of(TOKENIZER, markers=markers, opened=opened)

    read(reader, [*([] if opened else encode(markers.open)), *thought, *encode(markers.close), *answer])

    assert reader.num_reasoning_tokens == len(thought)


def test_thinking_that_is_cut_is_counted_up_to_what_may_be_its_close_marker() -> None:
    reader = reader_of(TOKENIZER, markers=SPELLED, opened=True)

    read(reader, [*encode("let me"), *encode(" "), *encode("[/THI")])

    assert reader.num_reasoning_tokens == len([*encode("let me"), *encode(" ")])


@pytest.mark.parametrize("min_tokens", range(12))
@pytest.mark.parametrize("logprobs", [False, True])
def test_no_stop_string_ends_an_answer_within_its_least_tokens(min_tokens: int, logprobs: bool) -> None:
    ids = [token for letter in "aaSTOPaSTOPa" for token in encode(letter)]
    reader = reader_of(TOKENIZER, stops=("STOP",), min_tokens=min_tokens, logprobs=logprobs)

    deltas = read(reader, ids)

    first = next((place for place in (2, 7) if place >= min_tokens), None)
    assert told(deltas)[1] == "aaSTOPaSTOPa"[:first]
    assert (reader.stopped is None) == (first is None)
    assert not logprobs or [token.id for token in tokens(deltas)] == ids[:first]


@pytest.mark.parametrize("markers", [THINK, SPELLED])
@pytest.mark.parametrize("white", ["", "\n", "\n\n"])
def test_a_stop_string_that_is_a_marker_ends_the_answer_there(markers: Markers, white: str) -> None:
    text = f"{markers.open}\nhm\n{markers.close}\n\nHi"
    letters = [token for letter in text for token in encode(letter)]
    for ids in (encode(text), letters):
        closing, opening = f"{white}{markers.close}", f"{white}{markers.open}"
        marks = {"opening": markers.open, "closing": markers.close}
        at_close = reader_of(TOKENIZER, stops=(closing,), markers=markers, marker_stops=MarkerStops.of((closing,), **marks))
        at_open = reader_of(TOKENIZER, stops=(opening,), markers=markers, marker_stops=MarkerStops.of((opening,), **marks))

        assert told(read(at_close, ids)) == ("hm", "")
        assert told(read(at_open, ids)) == ("", "")
        assert (at_close.stopped, at_open.stopped) == (closing, opening)


@pytest.mark.parametrize("stop", ["hm</think>", "</think>\n\nHi", "a<think>", "<tool_call>{"])
def test_a_stop_string_that_has_a_marker_and_more_is_refused_by_name(stop: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        MarkerStops.of((stop,), opening="<think>", closing="</think>", call="<tool_call>")

    assert caught.value.param == "stop"
    assert repr(stop) in str(caught.value)


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
    assert reader.num_reasoning_tokens == len(encode("a <tool_call>?"))


@pytest.mark.parametrize("stop", ["<tool_call>", "\n<tool_call>", "</tool_call>", "</tool_call>\n"])
def test_a_stop_string_that_is_a_calls_marker_ends_the_answer_there(stop: str) -> None:
    marker_stops = MarkerStops.of((stop,), call="<tool_call>", call_end="\n</tool_call>")
    text = f"Let me see\n{CALL}\n{CALL}"
    letters = [token for letter in text for token in encode(letter)]
    for ids in (encode(text), letters):
        reader = with_calls(stops=(stop,), marker_stops=marker_stops)

        assert called(read(reader, ids)) == [Text("Let me see"), *(CALLED if "/" in stop else [])]
        assert reader.stopped == stop


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
