"""Completions: bodies into generations, deltas into bodies and golden event streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from dialect_kit import HEADER, Parts, chunks_of, frames_of, refused, streamed, token, whole
from vocabularies import KINDS, write
from weft.api.dialect import ParsedRequest
from weft.api.openai.completions import translate
from weft.errors import QueueFull, UnsupportedParameter
from weft.ipc.messages import TokenLogprob
from weft.text.stream import token_of
from weft.text.tokenizer import Tokenizer
from weft.text.types import Delta, Finish, Text, Token, Usage

USAGE = Usage(2, 4, cached_tokens=1, prefill_seconds=0.5, decode_seconds=0.25)
HEAD = '{"id":"cmpl-7","object":"text_completion","created":1,"model":"m","system_fingerprint":"f","choices":'
TIMINGS = (
    '"timings":{"cache_n":1,"prompt_n":1,"prompt_ms":500.0,"prompt_per_second":2.0,'
    '"predicted_n":4,"predicted_ms":250.0,"predicted_per_second":12.0,"queue_ms":0.0}'
)
DONE = "data: [DONE]"


def asked(**fields: Any) -> ParsedRequest:
    return translate({"prompt": "Once", **fields})


def frames(stream: bytes) -> list[str]:
    return frames_of(stream, HEAD)


# --- golden streams


def test_a_text_is_streamed_and_ends_with_its_stop() -> None:
    stream = streamed(asked(), [(0, [Text(" upon")]), (0, [Text(" a"), Text(" time"), Finish("stop", "\n", USAGE)])])

    assert frames(stream) == [
        'data: HEAD[{"index":0,"text":" upon","logprobs":null,"finish_reason":null}]}',
        'data: HEAD[{"index":0,"text":" a time","logprobs":null,"finish_reason":null}]}',
        'data: HEAD[{"index":0,"text":"","logprobs":null,"finish_reason":"stop","stop_reason":"\\n"}],' + TIMINGS + "}",
        DONE,
    ]


def test_length_and_usage_are_told_at_the_end() -> None:
    stream = streamed(asked(stream_options={"include_usage": True}), [(0, [Text("a")]), (0, [Finish("length", usage=USAGE)])])

    assert frames(stream) == [
        'data: HEAD[{"index":0,"text":"a","logprobs":null,"finish_reason":null}],"usage":null}',
        'data: HEAD[{"index":0,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null}],"usage":null,'
        + TIMINGS
        + "}",
        'data: HEAD[],"usage":{"prompt_tokens":2,"completion_tokens":4,"total_tokens":6,'
        '"prompt_tokens_details":{"cached_tokens":1},"completion_tokens_details":{"reasoning_tokens":0}}}',
        DONE,
    ]


def test_two_prompts_with_two_choices_each_are_four_choices_and_two_prompts() -> None:
    calls: Parts = [(choice, [Text(str(choice)), Finish("stop", usage=Usage(2 + choice, 1))]) for choice in (3, 1, 0, 2)]
    body = whole(asked(prompt=["a", "b"], n=2), calls)

    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "0"), (1, "1"), (2, "2"), (3, "3")]
    assert body["usage"]["prompt_tokens"] == 2 + 4
    assert body["usage"]["completion_tokens"] == 4


def test_choices_that_end_at_once_do_not_make_the_speed_negative() -> None:
    ends = [(choice, [Finish("stop", usage=Usage(2, tokens, decode_seconds=0.5))]) for choice, tokens in ((0, 2), (1, 0), (2, 0))]

    assert whole(asked(n=3), ends)["timings"]["predicted_per_second"] == 2.0


def test_an_echoed_prompt_has_log_probabilities_from_its_second_token_on() -> None:
    echo = Text("Hé du", (token("Hé", None), token(" du", -2.0, ("x", -0.25), (" du", -2.0))))
    answer = Text("!", (token("!", -0.5, ("!", -0.5)),))
    calls: Parts = [(0, [echo]), (0, [answer]), (0, [Finish("stop", usage=USAGE)])]
    request = asked(echo=True, logprobs=2)

    first = (
        '{"tokens":["Hé"," du"],"token_logprobs":[null,-2.0],"top_logprobs":[null,{"x":-0.25," du":-2.0}],"text_offset":[0,2]}'
    )
    second = '{"tokens":["!"],"token_logprobs":[-0.5],"top_logprobs":[{"!":-0.5}],"text_offset":[5]}'
    assert frames(streamed(request, calls))[:2] == [
        'data: HEAD[{"index":0,"text":"Hé du","logprobs":' + first + ',"finish_reason":null}]}',
        'data: HEAD[{"index":0,"text":"!","logprobs":' + second + ',"finish_reason":null}]}',
    ]
    assert whole(request, calls)["choices"][0]["logprobs"] == {
        "tokens": ["Hé", " du", "!"],
        "token_logprobs": [None, -2.0, -0.5],
        "top_logprobs": [None, {"x": -0.25, " du": -2.0}, {"!": -0.5}],
        "text_offset": [0, 2, 5],
    }


def test_the_chosen_token_stands_among_the_likeliest() -> None:
    calls: Parts = [(0, [Text("z", (token("z", -9.0, ("a", -0.5), ("b", -1.0), ("b", -2.0)),)), Finish("stop", usage=USAGE)])]

    assert whole(asked(logprobs=3), calls)["choices"][0]["logprobs"]["top_logprobs"] == [{"a": -0.5, "b": -1.0, "z": -9.0}]


def of_bytes(data: bytes) -> Token:
    return Token(1, data.decode(errors="replace"), data, TokenLogprob(1, -1.0))


def offsets_of(parts: Parts, **fields: Any) -> list[int]:
    found: list[int] = whole(asked(logprobs=0, **fields), parts)["choices"][0]["logprobs"]["text_offset"]
    return found


@settings(max_examples=300)
@given(st.data(), st.text(st.sampled_from("a \né́漢字🙂"), min_size=1, max_size=12))
def test_every_token_begins_at_the_character_of_its_first_byte_however_text_tokens_and_pieces_are_cut(
    data: st.DataObject, text: str
) -> None:
    raw = text.encode()
    ends = sorted({*data.draw(st.lists(st.integers(1, len(raw)))), len(raw)})
    begins = [0, *ends[:-1]]
    character = [index for index, one in enumerate(text) for _ in one.encode()]  # of each byte
    pieces = sorted({*data.draw(st.lists(st.integers(1, len(text)))), len(text)})
    spans = [(max([0, *(piece for piece in pieces if piece < end)]), end) for end in pieces]
    deltas = [
        Text(
            text[first:last],
            tuple(of_bytes(raw[at:end]) for at, end in zip(begins, ends, strict=True) if first <= character[end - 1] < last),
        )
        for first, last in spans
    ]

    assert offsets_of([(0, [delta]) for delta in deltas] + [(0, [Finish("stop", usage=USAGE)])]) == [
        character[at] for at in begins
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["漢字 is a word", "café 🙂🙂 x", " two  blanks 漢 ", "漢漢a"])
def test_every_token_of_an_echoed_prompt_points_at_its_text(kind: str, text: str, tmp_path: Path) -> None:
    write(kind, tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(text, add_special_tokens=True)
    tokens = [token_of(tokenizer, one, TokenLogprob(one, -1.0)) for one in ids]
    found = offsets_of([(0, [Text(text, tuple(tokens)), Finish("stop", usage=USAGE)])], echo=True)

    assert found == sorted(found)
    for one, offset in zip(tokens, found, strict=True):
        is_odd = "\ufffd" in one.text or one.text == "<unk>"  # half a character, or one that the vocabulary can not write
        assert is_odd or text.startswith((one.text, one.text.removeprefix(" ")), offset)


def test_a_broken_character_comes_before_the_token_that_shows_it_is_broken() -> None:
    broken = Text("\ufffdab", (of_bytes(b"\xf0\x9f"), of_bytes(b"a"), of_bytes(b"b")))

    assert offsets_of([(0, [broken, Finish("stop", usage=USAGE)])]) == [0, 1, 2]


def test_tokens_that_a_text_does_not_show_move_no_other() -> None:
    begun = Text("Hi <s>!", tuple(of_bytes(one) for one in (b"<s>", b"Hi", b" ", b"<s>", b"!")))
    after = Text("?", (of_bytes(b"?"),))

    assert offsets_of([(0, [begun]), (0, [after, Finish("stop", usage=USAGE)])]) == [0, 0, 2, 3, 6, 7]


def test_a_heartbeat_says_nothing() -> None:
    assert frames(asked().reply(HEADER).frame_heartbeat(1, 2)) == [
        ": prefill 1/2",
        'data: HEAD[{"index":0,"text":"","logprobs":null,"finish_reason":null}]}',
    ]


def test_a_failure_in_the_stream_is_told_and_not_called_done() -> None:
    assert asked().reply(HEADER).frame_error(QueueFull("Full.")) == (
        b'data: {"error":{"message":"Full.","type":"rate_limit_error","param":null,"code":"queue_full"}}\n\n'
    )


def test_a_whole_reply_has_every_part() -> None:
    assert whole(asked(), [(0, [Text("a")]), (0, [Text("b"), Finish("length", usage=USAGE)])]) == {
        "id": "cmpl-7",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "system_fingerprint": "f",
        "choices": [{"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 4,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        "timings": json.loads("{" + TIMINGS + "}")["timings"],
    }


def _spoken(texts: list[str]) -> Text:
    return Text("".join(texts), tuple(token(text, -1.0, (text, -1.0)) for text in texts))


_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
_finishes = st.builds(Finish, st.sampled_from(["stop", "length"]), st.sampled_from([None, "x", 3]), st.just(USAGE))


@st.composite
def _calls(draw: st.DrawFn, choices: int, deltas: st.SearchStrategy[Delta]) -> list[tuple[int, list[Delta]]]:
    calls = draw(st.lists(st.tuples(st.integers(0, choices - 1), st.lists(deltas, max_size=4)), max_size=8))
    return calls + [(choice, [draw(_finishes)]) for choice in draw(st.permutations(range(choices)))]


@settings(max_examples=80)
@given(st.data(), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_streamed_is_whole(data: st.DataObject, prompts: int, n: int, logprobs: bool) -> None:
    deltas = st.lists(_texts, max_size=3).map(_spoken) if logprobs else st.builds(Text, _texts)
    calls = data.draw(_calls(prompts * n, deltas))
    request = asked(prompt=["a"] * prompts, n=n, logprobs=0 if logprobs else None)
    body, told = whole(request, calls), chunks_of(streamed(request, calls))

    Completion.model_validate(body, strict=True)
    assert told[-1]["timings"] == body["timings"]
    for choice in body["choices"]:
        mine = [piece for chunk in told for piece in chunk["choices"] if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"]
        for field, values in (choice["logprobs"] or {}).items():
            assert [value for piece in mine[:-1] for value in piece["logprobs"][field]] == values
        for text, offset in (
            zip(*(choice["logprobs"][name] for name in ("tokens", "text_offset")), strict=True) if logprobs else ()
        ):
            assert choice["text"][offset:].startswith(text)


def test_a_choice_says_whether_it_fits_its_schema() -> None:
    calls: Parts = [(0, [Text("{}"), Finish("stop", usage=USAGE, schema_errors=("$: wrong",))])]
    last = chunks_of(streamed(asked(), calls))[-1]["choices"][0]

    assert last["schema_validation"] == {"valid": False, "errors": ["$: wrong"]}
    assert whole(asked(), calls)["choices"][0]["schema_validation"] == last["schema_validation"]


# --- parameters


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
    ],
)
def test_a_prompt_is_text_or_ids_one_or_several(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert asked(prompt=prompt).generation.prompts == prompts


@pytest.mark.parametrize(
    ("fields", "sampling"),
    [
        ({}, {}),
        ({"max_tokens": 5, "temperature": 0, "logprobs": 5}, {"max_tokens": 5, "temperature": 0.0, "logprobs": 5}),
        ({"max_tokens": 0, "echo": True, "logprobs": 1}, {"max_tokens": 0, "logprobs": 1}),
        ({"top_k": 0, "min_p": 0.5, "ignore_eos": True}, {"top_k": 0, "min_p": 0.5, "ignore_eos": True}),
        ({"logprobs": None, "best_of": None, "suffix": None}, {}),
    ],
)
def test_sampling_fields_act(fields: dict[str, Any], sampling: dict[str, Any]) -> None:
    assert asked(**fields).generation.sampling == sampling


def test_the_other_fields_act() -> None:
    generation = asked(echo=True, n=2, stop="x", skip_special_tokens=False, model="y").generation

    assert (generation.echo, generation.n, generation.stops, generation.model) == (True, 2, ("x",), "y")
    assert not generation.skip_special_tokens
    assert not generation.split_thinking


@pytest.mark.parametrize(
    ("name", "value"),
    [("suffix", "x"), ("best_of", 3), ("dry_multiplier", 1), ("thinking_token_budget", 5), ("reasoning_budget", 0)],
)
def test_what_is_not_done_yet_is_refused_by_name(name: str, value: Any) -> None:
    error = refused(asked, **{name: value})

    assert isinstance(error, UnsupportedParameter)
    assert name in str(error)
    assert error.param == name


def test_harmless_fields_are_accepted_and_unknown_ones_told() -> None:
    harmless = {"user": "me", "suffix": "", "best_of": 1, "reasoning_budget_tokens": -1, "thinking_token_budget": None}
    assert asked(**harmless, messages=[], zebra=1).ignored == ("messages", "zebra")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "got `null`"),
        ({"prompt": []}, "prompt", "length >= 1"),
        ({"prompt": [[]]}, "prompt[0]", "length >= 1"),
        ({"prompt": [1, "a"]}, "prompt", "list of texts"),
        ({"prompt": ["a", [1]]}, "prompt", "list of texts"),
        ({"prompt": [[1], 2]}, "prompt", "list of texts"),
        ({"prompt": [-1]}, "prompt[0]", ">= 0"),
        ({"prompt": [True]}, "prompt[0]", "got `bool`"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]", "got `str`"),
        ({"prompt": ["a"] * 65, "n": 2}, "prompt", "more than 128 choices"),
        ({"max_tokens": 0}, "max_tokens", "only with echo"),
        ({"max_tokens": -2}, "max_tokens", ">= -1"),
        ({"logprobs": 6}, "logprobs", "<= 5"),
        ({"logprobs": True}, "logprobs", "got `bool`"),
        ({"echo": 1}, "echo", "got `int`"),
    ],
)
def test_a_bad_value_is_named_with_its_place(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(asked, **fields)

    assert error.param == param
    assert words in str(error)


def test_a_missing_prompt_is_asked_for() -> None:
    error = refused(translate, {})

    assert (error.param, str(error)) == ("prompt", "prompt is required")
