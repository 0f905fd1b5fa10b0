"""Whichever wire brings the results of parallel calls, and in whichever order: the model reads each as that of its own call."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import permutations
from typing import Any

import pytest

from weft.api import ollama
from weft.api.anthropic import request as anthropic
from weft.api.dialect import ParsedRequest
from weft.api.openai import chat, responses
from weft.errors import InvalidRequest
from weft.model.resolve import TINY_HYBRID
from weft.text.codec import Codec

Body = dict[str, Any]
NAMES = ("look", "read", "find", "list")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
ASKED = "Look at them all."


@cache
def codec() -> Codec:
    return Codec(TINY_HYBRID)


def prompt(parsed: ParsedRequest) -> str:
    (encoded,) = codec().encode_request(parsed.generation)
    return codec().tokenizer.decode(encoded.ids, skip_special_tokens=False)


def arguments(number: int) -> Body:
    return {"path": f"zqpath{number}"}


# Each takes how many calls were made and the numbers of the results in their order, and returns the request.


def on_chat(count: int, results: Sequence[int]) -> ParsedRequest:
    calls = [
        {"id": f"call_{n}", "type": "function", "function": {"name": NAMES[n], "arguments": arguments(n)}} for n in range(count)
    ]
    told = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"zqfound{n}"} for n in results]
    messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": None, "tool_calls": calls}, *told]
    tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    return chat.translate({"messages": messages, "tools": tools})


def _uses(count: int) -> Body:
    uses = [{"type": "tool_use", "id": f"toolu_{n}", "name": NAMES[n], "input": arguments(n)} for n in range(count)]
    return {"role": "assistant", "content": uses}


def _on_messages(*messages: Body) -> ParsedRequest:
    tools = [{"name": name, "input_schema": SCHEMA} for name in NAMES]
    return anthropic.translate({"max_tokens": 9, "messages": [{"role": "user", "content": ASKED}, *messages], "tools": tools})


def on_messages(count: int, results: Sequence[int]) -> ParsedRequest:
    blocks = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"zqfound{n}"} for n in results]
    return _on_messages(_uses(count), {"role": "user", "content": blocks or "?"})


def on_messages_one_by_one(count: int, results: Sequence[int]) -> ParsedRequest:
    """Every result in a message of its own."""
    blocks = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": f"zqfound{n}"} for n in results]
    return _on_messages(_uses(count), *([{"role": "user", "content": [block]} for block in blocks] or [QUESTION]))


def _items(count: int, results: Sequence[int]) -> tuple[list[Body], list[Body]]:
    """Calls and results; every second call is that of a custom tool."""
    functions = [{"type": "function_call", "name": NAMES[n], "arguments": json.dumps(arguments(n))} for n in range(count)]
    customs = [{"type": "custom_tool_call", "name": NAMES[n], "input": f"zqpath{n}"} for n in range(count)]
    calls = [(customs if n % 2 else functions)[n] | {"call_id": f"call_{n}"} for n in range(count)]
    kinds = ("function_call_output", "custom_tool_call_output")
    return calls, [{"type": kinds[n % 2], "call_id": f"call_{n}", "output": f"zqfound{n}"} for n in results]


def _on_responses(items: Sequence[Body], past: Sequence[Body] = ()) -> ParsedRequest:
    tools = [{"type": "custom" if n % 2 else "function", "name": name} for n, name in enumerate(NAMES)]
    return responses.translate({"input": list(items), "tools": tools}, responses.Past(items=tuple(past)))


QUESTION = {"role": "user", "content": ASKED}


def on_responses(count: int, results: Sequence[int]) -> ParsedRequest:
    calls, outputs = _items(count, results)
    return _on_responses([QUESTION, *calls, *outputs])


def on_responses_with_thinking_between(count: int, results: Sequence[int]) -> ParsedRequest:
    calls, outputs = _items(count, results)
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    return _on_responses([QUESTION, *(item for call in calls for item in (thought, call)), *outputs])


def on_stored_responses(count: int, results: Sequence[int]) -> ParsedRequest:
    calls, outputs = _items(count, results)
    return _on_responses(outputs, [QUESTION, *calls])


def _on_ollama(count: int, results: Sequence[Body], *, ids: bool) -> ParsedRequest:
    known = [{"id": f"call_{n}"} if ids else {} for n in range(count)]
    calls = [known[n] | {"function": {"name": NAMES[n], "arguments": arguments(n)}} for n in range(count)]
    tools = [{"function": {"name": name, "parameters": SCHEMA}} for name in NAMES]
    return ollama.translate_chat({"messages": [QUESTION, {"role": "assistant", "tool_calls": calls}, *results], "tools": tools})


def on_ollama(count: int, results: Sequence[int]) -> ParsedRequest:
    told = [{"role": "tool", "tool_call_id": f"call_{n}", "content": f"zqfound{n}"} for n in results]
    return _on_ollama(count, told, ids=True)


def on_ollama_by_name(count: int, results: Sequence[int]) -> ParsedRequest:
    told = [{"role": "tool", "tool_name": NAMES[n], "content": f"zqfound{n}"} for n in results]
    return _on_ollama(count, told, ids=False)


Wire = Callable[[int, Sequence[int]], ParsedRequest]
WITH_IDS: list[Wire] = [on_chat, on_messages, on_messages_one_by_one, on_responses, on_stored_responses, on_ollama]
WIRES: list[Wire] = [*WITH_IDS, on_responses_with_thinking_between, on_ollama_by_name]


@pytest.mark.parametrize("ask", WIRES)
def test_results_of_parallel_calls_are_read_in_the_order_of_the_calls(ask: Wire) -> None:
    for count in range(1, 5):
        in_order = prompt(ask(count, range(count)))
        words = [f"zqfound{number}" for number in range(count)]
        assert [in_order.count(word) for word in words] == [1] * count
        assert sorted(words, key=in_order.index) == words
        for order in permutations(range(count)):
            assert prompt(ask(count, order)) == in_order


@pytest.mark.parametrize("ask", WIRES)
def test_a_call_whose_result_is_missing_is_named(ask: Wire) -> None:
    for count in range(1, 5):
        for missing in range(count):
            with pytest.raises(InvalidRequest, match=f"the call of {NAMES[missing]}.* has no result"):
                prompt(ask(count, [number for number in reversed(range(count)) if number != missing]))


@pytest.mark.parametrize("ask", WIRES)
def test_a_result_that_comes_twice_is_named(ask: Wire) -> None:
    for count in range(1, 5):
        for twice in range(count):
            with pytest.raises(InvalidRequest, match=f"one more result of .*({NAMES[twice]}|call_{twice}).* has one already"):
                prompt(ask(count, [*range(count), twice]))


@pytest.mark.parametrize("ask", WITH_IDS)
def test_a_result_of_no_call_is_named(ask: Wire) -> None:
    for count in range(1, 4):
        for results in ([*range(count), count], [*range(count - 1), count]):
            with pytest.raises(
                InvalidRequest, match=f"the call 'call_{count}', which is not among the calls before it: 'call_0'"
            ):
                prompt(ask(count, results))


def test_places_are_those_of_the_request() -> None:
    places: dict[Wire, tuple[str, str]] = {
        on_chat: ("messages[1].tool_calls[0]", "messages[2]"),
        on_messages: ("messages[1].content[0]", "messages[2].content[0]"),
        on_responses: ("input[1]", "input[2]"),
        on_stored_responses: ("previous_response_id", "input[0]"),
        on_ollama: ("messages[1].tool_calls[0]", "messages[2]"),
    }
    for ask, (of_call, of_result) in places.items():
        with pytest.raises(InvalidRequest) as missing:
            prompt(ask(1, []) if ask is not on_messages else _on_messages(_uses(1), QUESTION))
        with pytest.raises(InvalidRequest) as foreign:
            prompt(ask(1, [1]))

        assert (missing.value.param, foreign.value.param) == (of_call, of_result)


def test_an_unanswered_call_before_the_user_s_next_message_is_refused() -> None:
    calls, _ = _items(2, ())

    with pytest.raises(InvalidRequest, match="call of look with the id 'call_0', has no result"):
        prompt(_on_responses([QUESTION, *calls, QUESTION]))
    with pytest.raises(InvalidRequest, match="call of look with the id 'call_0', has no result"):
        prompt(_on_responses([QUESTION], [QUESTION, *calls]))


def test_a_call_that_was_cut_short_needs_no_result() -> None:
    calls, outputs = _items(2, (0,))
    cut = {**calls[1], "status": "incomplete", "input": "zqcut"}

    for parsed in (_on_responses([QUESTION, calls[0], cut, *outputs]), _on_responses(outputs, [QUESTION, calls[0], cut])):
        assert "zqfound0" in prompt(parsed)
        assert "zqcut" not in prompt(parsed)


def test_calls_that_came_with_their_results_may_stand_between_others() -> None:
    searched = {"type": "web_search_call", "id": "ws_1", "action": {"query": "zqquery"}, "results": [{"text": "zqweb"}]}
    calls, outputs = _items(2, (1, 0))

    text = prompt(_on_responses([QUESTION, calls[0], searched, calls[1], *outputs]))

    assert sorted(("zqweb", "zqfound0", "zqfound1"), key=text.index) == ["zqfound0", "zqweb", "zqfound1"]


def test_outputs_of_openai_s_own_tools_find_their_calls_by_either_id_or_in_order() -> None:
    shell = [{"type": "local_shell_call", "id": f"lsh_{n}", "call_id": f"call_{n}", "action": {"n": n}} for n in range(2)]
    search = {"type": "tool_search_call", "id": "tsc_1", "call_id": None, "arguments": {"q": "zq"}}
    told = [
        {"type": "local_shell_call_output", "id": f"{kind}_{n}", "output": f"zqfound{n}"} for kind, n in (("lsh", 1), ("call", 0))
    ]
    tools = {"type": "tool_search_output", "id": "tso_1", "call_id": None, "tools": ["zqtools"]}

    text = prompt(_on_responses([QUESTION, *shell, search, tools, *told]))

    assert sorted(("zqfound0", "zqfound1", "zqtools"), key=text.index) == ["zqfound0", "zqfound1", "zqtools"]
