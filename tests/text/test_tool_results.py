"""Results of parallel calls are read as those of their own calls, in whatever order and form they were sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.errors import InvalidRequest
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec
from weft.text.normalise import PromptWriter
from weft.text.template import ChatTemplate
from weft.text.tool_results import one_call_per_turn, pair_results
from weft.text.types import Conversation, Message, ToolCall

FILES = {path.stem: path for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))}
FILES["tiny-hybrid"] = TINY_HYBRID / "chat_template.jinja"
NAMES = ("look", "read", "find", "list")
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object", "properties": {}}}}
    for name in NAMES
)
QUESTION, TEXT = Message("user", "zqquestion"), Message("user", "zqtext")

LOOP = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
CALL = "{{ c.function.name }}({{ c.function.arguments | tojson }})"
CALLS = "{% for c in m.tool_calls %}" + CALL + "{% endfor %}"
# Shapes that templates of the wild have, in their shortest form.
SHAPES = {
    "one call per turn": LOOP + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}{{ raise_exception('only one') }}"
    "{% endif %}" + CALLS + "{% else %}{{ m.role }}: {{ m.content }}{% endif %}\n{% endfor %}",
    "the first call alone": LOOP + "{% if m.tool_calls %}{% set c = m.tool_calls[0] %}" + CALL + "{% else %}"
    "{{ m.role }}: {{ m.content }}{% endif %}\n{% endfor %}",
    "the name of a result": LOOP + "{{ '<' + (m.name if m.role == 'tool' else m.role) + '>' }}{{ m.content or '' }}" + CALLS
    + "\n{% endfor %}",
    "ids": LOOP + "{{ m.role }} {{ m.tool_call_id }}: {{ m.content or '' }}{% for c in m.tool_calls %}{{ c.id }}=" + CALL
    + "{% endfor %}\n{% endfor %}",
    "a queue of ids": "{% set queue = namespace(ids=[]) %}" + LOOP + "{{ m.role }}: "
    "{% if m.role == 'tool' %}{{ queue.ids.pop(0) }} {% endif %}{{ m.content or '' }}{% for c in m.tool_calls %}"
    "{% set _ = queue.ids.append(c.function.name ~ loop.index0) %}{{ queue.ids[-1] }}=" + CALL + "{% endfor %}\n{% endfor %}",
    "the results that follow": LOOP + "{% if m.role != 'tool' %}{{ m.role }}: {{ m.content or '' }}" + CALLS
    + "{% set ns = namespace(open=true) %}{% for r in messages[loop.index:] if m.tool_calls %}"
    "{% if r.role != 'tool' %}{% set ns.open = false %}{% elif ns.open %}({{ r.content }}){% endif %}{% endfor %}\n{% endif %}"
    "{% endfor %}",
    "no user after a result": "{% set ns = namespace(last='') %}" + LOOP
    + "{% if ns.last == 'tool' and m.role == 'user' %}{{ raise_exception('no user here') }}{% endif %}{% set ns.last = m.role %}"
    "{{ m.role }}: {{ m.content or '' }}" + CALLS + "\n{% endfor %}",
}  # fmt: skip


@cache
def writer(name: str) -> PromptWriter:
    source = SHAPES[name] if name in SHAPES else FILES[name].read_text(encoding="utf-8")
    return PromptWriter(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}))


def has_place(name: str) -> bool:
    return bool(writer(name)._with_tools.arguments)


WITH_PLACE = [name for name in [*FILES, *SHAPES] if has_place(name)]


def calls(count: int, turn: int = 1) -> Message:
    return Message("assistant", None, tool_calls=tuple(call(number, turn) for number in range(count)))


def call(number: int, turn: int = 1) -> ToolCall:
    return ToolCall(NAMES[number], json.dumps({"path": f"zqpath{turn}{number}"}), f"call{turn}000{number}")


def result(number: int, turn: int = 1) -> Message:
    return Message("tool", f"zqfound{turn}{number}", tool_call_id=call(number, turn).id)


def turns(count: int, order: tuple[int, ...], turn: int = 1) -> tuple[Message, ...]:
    return (calls(count, turn), *(result(number, turn) for number in order))


def orders(*counts: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    return ((count, order) for count in counts for order in permutations(range(count)))


def found(prompt: str, count: int, turn: int = 1) -> list[int]:
    """The places of calls' and results' words, which are there once each."""
    words = [f"zqpath{turn}{number}" for number in range(count)] + [f"zqfound{turn}{number}" for number in range(count)]
    body = prompt.partition("zqquestion")[2]
    assert [body.count(word) for word in words] == [1] * len(words)
    return [body.index(word) for word in words]


def check_pairs(prompt: str, count: int, turn: int = 1) -> None:
    places = found(prompt, count, turn)
    arguments, results = places[:count], places[count:]
    assert arguments == sorted(arguments)
    assert results == sorted(results)
    assert all(before < after for before, after in zip(arguments, results, strict=True))


@pytest.mark.parametrize("name", WITH_PLACE)
def test_results_stand_in_the_order_of_their_calls_whatever_order_they_came_in(name: str) -> None:
    for count, order in orders(1, 2, 3, 4):
        prompt = writer(name).write(Conversation((QUESTION, *turns(count, order)), TOOLS))

        check_pairs(prompt, count)
        assert prompt == writer(name).write(Conversation((QUESTION, *turns(count, tuple(range(count)))), TOOLS))


@pytest.mark.parametrize("name", WITH_PLACE)
def test_so_they_do_in_every_tool_turn_of_a_conversation(name: str) -> None:
    for first, order in orders(1, 2):
        for second, later in orders(1, 3):
            messages = (QUESTION, *turns(first, order), *turns(second, later, 2))
            prompt = writer(name).write(Conversation(messages, TOOLS))

            check_pairs(prompt, first)
            check_pairs(prompt, second, 2)
            assert found(prompt, first)[-1] < found(prompt, second, 2)[0]


@pytest.mark.parametrize("name", WITH_PLACE)
def test_a_text_of_the_user_in_the_turn_of_the_results_follows_them(name: str) -> None:
    for count, order in orders(1, 2):
        messages = (QUESTION, *turns(count, order), TEXT)
        prompt = writer(name).write(Conversation(messages, TOOLS))
        later = writer(name).write(Conversation((*messages, *turns(1, (0,), 2)), TOOLS))

        check_pairs(prompt, count)
        assert found(prompt, count)[-1] < prompt.index("zqtext") - prompt.index("zqquestion")
        assert prompt.count("zqtext") == later.count("zqtext") == 1
        check_pairs(later, 1, 2)


@pytest.mark.parametrize("name", WITH_PLACE)
def test_a_system_message_among_the_results_stands_behind_them(name: str) -> None:
    late = Message("system", "zqlate")
    for count, order in orders(1, 2, 3):
        whole = (QUESTION, *turns(count, order))
        for more in [(), (Message("assistant", "zqanswer"), TEXT), turns(2, (1, 0), 2)]:
            behind = writer(name).write(Conversation((*whole, late, *more), TOOLS))
            for place in range(2, len(whole)):
                among = (*whole[:place], late, *whole[place:])
                assert writer(name).write(Conversation((*among, *more), TOOLS)) == behind
            assert behind.count("zqlate") == 1
            check_pairs(behind, count)


@pytest.mark.parametrize("name", WITH_PLACE)
def test_a_history_with_parallel_calls_is_the_beginning_of_the_next_prompt(name: str) -> None:
    for count, order in orders(1, 2, 3):
        history = (QUESTION, *turns(count, order))
        before = writer(name).write(Conversation(history, TOOLS, add_generation_prompt=False))
        after = writer(name).write(Conversation((*history, *turns(1, (0,), 2)), TOOLS, add_generation_prompt=False))

        assert after.startswith(before)


def test_every_shape_of_a_template_here_has_a_place_for_tools() -> None:
    assert {*SHAPES} <= {*WITH_PLACE}
    assert [writer(name)._with_tools.several_calls for name in ("one call per turn", "the first call alone")] == [False, False]
    assert not writer("no user after a result")._with_tools.user_follows_tool


def test_a_result_has_the_name_of_its_call() -> None:
    prompt = writer("the name of a result").write(Conversation((QUESTION, *turns(2, (1, 0))), TOOLS))
    renamed = [replace(one, name="mine") if one.role == "tool" else one for one in turns(2, (1, 0))]

    assert "<look>zqfound10<read>zqfound11" in prompt
    assert [one.name for one in pair_results(renamed)[1:]] == ["look", "read"]


def without_ids(*messages: Message) -> tuple[Message, ...]:
    """The same without ids of calls and results."""
    calls = [tuple(replace(call, id=None) for call in message.tool_calls) for message in messages]
    return tuple(replace(one, tool_calls=given, tool_call_id=None) for one, given in zip(messages, calls, strict=True))


def test_results_without_ids_are_paired_by_name_then_by_order() -> None:
    for count, order in orders(1, 2, 3, 4):
        ordered = pair_results((QUESTION, *turns(count, tuple(range(count)))))
        named = [replace(result(number), name=NAMES[number]) for number in order]
        paired = pair_results(without_ids(QUESTION, calls(count), *named))
        by_order = pair_results(without_ids(QUESTION, *turns(count, tuple(range(count)))))

        assert [one.content for one in paired] == [one.content for one in ordered] == [one.content for one in by_order]
        assert [one.name for one in paired[2:]] == list(NAMES[:count])
        assert [one.tool_call_id for one in paired[2:]] == [call.id for call in paired[1].tool_calls]
        assert len({call.id for call in paired[1].tool_calls}) == count


def test_a_result_with_a_name_goes_before_those_that_have_none() -> None:
    unnamed, named = Message("tool", "of the first"), Message("tool", "of look", name="look")
    twice = Message("assistant", None, tool_calls=tuple(ToolCall(name, "{}") for name in ("look", "read", "look")))

    paired = pair_results((QUESTION, twice, unnamed, named, Message("tool", "of the last")))

    assert [one.content for one in paired[2:]] == ["of look", "of the first", "of the last"]


def test_only_results_move_and_only_among_their_own_places() -> None:
    system, thought = Message("system", "s"), Message("assistant", "so far")
    messages = (result(1), QUESTION, calls(2), system, thought, result(1), TEXT, result(0), thought, system)[1:]

    paired = pair_results(messages)

    assert [one.content for one in paired] == [
        *(one.content for one in messages[:4]),
        "zqfound10",
        "zqtext",
        "zqfound11",
        "so far",
        "s",
    ]
    assert [one.place for one in paired if one.role == "tool"] == ["messages[6]", "messages[4]"]


def test_neighbouring_answers_with_calls_are_one_round() -> None:
    """As of a client of the Responses API that thinks between two calls."""
    messages = (QUESTION, calls(1), Message("assistant", None, "hm", (call(1),)), result(1), result(0))

    assert [one.content for one in pair_results(messages)[3:]] == ["zqfound10", "zqfound11"]


def test_the_same_ids_may_come_again_in_another_turn() -> None:
    again = tuple(replace(one, content=f"again {one.content}") if one.role == "tool" else one for one in turns(2, (1, 0)))

    paired = pair_results((QUESTION, *turns(2, (1, 0)), *again))

    assert [one.content for one in paired if one.role == "tool"] == [
        *("zqfound10", "zqfound11"),
        *("again zqfound10", "again zqfound11"),
    ]


@st.composite
def answered_histories(draw: st.DrawFn) -> list[Message]:
    """Histories of calls with ids of their own, each answered once anywhere behind its call."""
    messages, waiting, count = [QUESTION], list[str](), 0
    for kind in draw(st.lists(st.sampled_from(["call", "result", "result", "user", "system", "assistant"]), max_size=12)):
        if kind == "call":
            ids = [f"c{count + number}" for number in range(draw(st.integers(1, 2)))]
            count, waiting = count + len(ids), waiting + ids
            messages.append(Message("assistant", None, tool_calls=tuple(ToolCall(f"f{one}", "{}", one) for one in ids)))
        elif kind == "result" and waiting:
            messages.append(answer_to(waiting.pop(draw(st.integers(0, len(waiting) - 1)))))
        elif kind != "result":
            messages.append(Message("user" if kind == "user" else "system" if kind == "system" else "assistant", kind))
    return [*messages, *map(answer_to, draw(st.permutations(waiting)))]


def answer_to(call_id: str) -> Message:
    return Message("tool", f"of {call_id}", tool_call_id=call_id)


@settings(max_examples=1000, deadline=None)
@given(answered_histories())
def test_a_result_finds_its_call_by_the_id_however_many_rounds_it_comes_behind_it(messages: list[Message]) -> None:
    paired = pair_results(messages)

    results = [one for one in paired if one.role == "tool"]
    assert [one for one in paired if one.role != "tool"] == [one for one in messages if one.role != "tool"]
    assert [(one.content, one.name) for one in results] == [(f"of {one.tool_call_id}", f"f{one.tool_call_id}") for one in results]
    ids = [call.id for one in messages for call in one.tool_calls]
    assert [one.tool_call_id for one in results] == ids  # in the order of the calls
    for same in (paired, one_call_per_turn(paired)):
        calls = {call.id: index for index, one in enumerate(same) for call in one.tool_calls}
        assert all(calls[one.tool_call_id] < index for index, one in enumerate(same) if one.role == "tool")
        assert [call.id for one in same for call in one.tool_calls] == ids


def test_a_moved_message_keeps_its_path_in_the_request() -> None:
    late = (QUESTION, calls(2), result(1), calls(1, 2), result(0), TEXT, result(0, 2))

    paired = pair_results(late)

    assert [one.content for one in paired] == ["zqquestion", None, "zqfound10", "zqfound11", None, "zqtext", "zqfound20"]
    assert [one.place for one in paired] == [f"messages[{index}]" for index in (0, 1, 4, 2, 3, 5, 6)]


def test_an_agent_may_leave_out_whole_turns() -> None:
    whole = (QUESTION, *turns(2, (1, 0)), *turns(3, (2, 0, 1), 2))

    assert [one.content for one in pair_results(whole[4:]) if one.role == "tool"] == ["zqfound20", "zqfound21", "zqfound22"]


def test_a_call_without_a_result_is_named() -> None:
    for count in range(1, 5):
        for missing in range(count):
            given = tuple(result(number) for number in reversed(range(count)) if number != missing)
            for after in [(), (TEXT,), turns(1, (0,), 2), (Message("assistant", "so"), TEXT)]:
                with pytest.raises(
                    InvalidRequest, match=f"call of {NAMES[missing]} with the id 'call1000{missing}', has no"
                ) as caught:
                    pair_results((QUESTION, calls(count), *given, *after))
                assert caught.value.param == f"messages[1].tool_calls[{missing}]"


def test_a_conversation_that_is_not_to_be_answered_may_end_with_open_calls() -> None:
    open_calls = (QUESTION, calls(2), result(1))

    assert [one.name for one in pair_results(open_calls, is_answered=False)] == [None, None, "read"]
    assert [one.tool_call_id for one in one_call_per_turn(pair_results(open_calls, is_answered=False))] == [
        None,
        None,
        None,
        "call10001",
    ]
    with pytest.raises(InvalidRequest, match="'call10000', has no result"):
        pair_results((*open_calls, *turns(1, (0,), 2)), is_answered=False)


def test_a_result_without_a_call_is_named() -> None:
    for count, order in orders(1, 2, 3, 4):
        for place in range(count + 1):
            given = [result(number) for number in order]
            foreign = replace(result(0), tool_call_id="call_x")
            with pytest.raises(
                InvalidRequest, match="the call 'call_x', which is not among the calls before it: 'call10000'"
            ) as caught:
                pair_results((QUESTION, calls(count), *given[:place], foreign, *given[place:]))
            assert caught.value.param == f"messages[{2 + place}]"
    with pytest.raises(InvalidRequest, match=r"messages\[1\] is the result of the call 'call10000', .* there is none"):
        pair_results((QUESTION, result(0)))
    with pytest.raises(InvalidRequest, match="a call of stop, which is not among the calls before it: look"):
        pair_results(without_ids(QUESTION, calls(1), Message("tool", "x", name="stop")))


def test_a_second_result_of_one_call_is_named() -> None:
    for count, order in orders(1, 2, 3, 4):
        for twice in range(count):
            given = [result(number) for number in order] + [result(twice)]
            with pytest.raises(
                InvalidRequest, match=f"one more result of the call 'call1000{twice}', which has one already"
            ) as caught:
                pair_results((QUESTION, calls(count), *given))
            assert caught.value.param == f"messages[{2 + count}]"
    for between in [turns(1, (0,), 2), (*turns(2, (1, 0), 2), *turns(1, (0,), 3)), (*turns(1, (0,), 2), TEXT)]:
        with pytest.raises(InvalidRequest, match="one more result of the call 'call10000', which has one already"):
            pair_results((QUESTION, *turns(1, (0,)), *between, result(0)))
    for extra in [Message("tool", "x"), Message("tool", "x", name="look")]:
        with pytest.raises(InvalidRequest, match="which has one already"):
            pair_results(without_ids(QUESTION, *turns(1, (0,)), extra))


def test_two_calls_of_one_turn_with_one_id_are_refused() -> None:
    same = tuple(replace(call(number), id="call_0") for number in range(2))

    with pytest.raises(
        InvalidRequest, match=r"messages\[1\]\.tool_calls\[1\] has the id 'call_0', which a call beside it has too"
    ):
        pair_results((QUESTION, Message("assistant", None, tool_calls=same)))


def test_a_result_that_speaks_of_no_call_may_come_before_any() -> None:
    """As clients of Ollama send it that leave out the model's turn."""
    assert pair_results((QUESTION, Message("tool", "sunny")))[1].content == "sunny"


def test_a_call_in_a_turn_of_its_own_is_followed_by_its_result() -> None:
    for count, order in orders(2, 3, 4):
        called = replace(calls(count), content="zqwords", reasoning="zqwhy", breakpoints=(0,))
        split = one_call_per_turn(pair_results((QUESTION, called, *turns(count, order)[1:], TEXT)))

        assert [one.role for one in split] == ["user", *["assistant", "tool"] * count, "user"]
        assert [call.id for one in split for call in one.tool_calls] == [one.tool_call_id for one in split if one.role == "tool"]
        assert [(one.content, one.reasoning, one.breakpoints) for one in split[1::2]] == [
            ("zqwords", "zqwhy", (0,)),
            *[(None, None, ())] * (count - 1),
            ("zqtext", None, ()),
        ]
        assert {one.place for one in split} == {f"messages[{index}]" for index in range(count + 3)}
    assert one_call_per_turn(turns(1, (0,))) == turns(1, (0,))


def test_boundaries_and_ids_are_those_of_results_in_order() -> None:
    codec = Codec(TINY_HYBRID)
    for count, order in orders(2, 3):
        sent = turns(count, order)
        marked = tuple(replace(one, breakpoints=(0,)) if one.content == "zqfound10" else one for one in sent)
        in_order = (marked[0], *sorted(marked[1:], key=lambda one: str(one.content)))
        there, back = (codec.encode(Conversation((QUESTION, *messages), TOOLS)) for messages in (marked, in_order))

        assert (there.ids, there.boundaries) == (back.ids, back.boundaries)
