"""Tools and choices from JSON: taken as they are meant, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from written import function

from weft.errors import InvalidRequest
from weft.text.tools import ToolSelection, read_tool_selection, read_tools

TOOLS = read_tools([function("f"), function("g", {"properties": {"a": {"type": "string"}}}, strict=True), function("ns.h", None)])
F, G, H = TOOLS


def test_tools_are_read() -> None:
    assert [tool.name for tool in TOOLS] == ["f", "g", "ns.h"]
    assert F.parameters == {"type": "object", "properties": {}, "additionalProperties": False}  # nothing said: nothing taken
    assert G.parameters == {"type": "object", "properties": {"a": {"type": "string"}}}
    assert G.strict
    assert not F.strict
    assert read_tools(None) == ()


@pytest.mark.parametrize(
    ("schema", "is_open"),
    [
        ({}, True),
        ({"properties": {"a": {}}}, False),
        ({"additionalProperties": False}, False),
        ({"properties": {"a": {}}, "additionalProperties": {}}, True),
        ({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, True),
    ],
)
def test_arguments_that_a_schema_does_not_name_come_as_it_says(schema: dict[str, Any], is_open: bool) -> None:
    assert read_tools([function("f", schema)])[0].is_open == is_open


def deep(levels: int) -> dict[str, Any]:
    return {"type": "object", "items": deep(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("tools", "param", "words"),
    [
        ([{"type": "web_search"}], "tools[0]", "must be"),
        (["f"], "tools[0]", "must be"),
        ([{"type": "function", "name": "f"}], "tools[0]", "must be"),
        ([function("")], "tools[0].function.name", "1 to 128 letters"),
        ([function("get weather")], "tools[0].function.name", "'get weather'"),
        ([function("x" * 129)], "tools[0].function.name", "1 to 128"),
        ([{"type": "function", "function": {}}], "tools[0].function.name", "None"),
        ([function("f"), function("g"), function("f")], "tools[2].function.name", "earlier tool"),
        ([function("f", [])], "tools[0].function.parameters", "JSON Schema"),
        ([function("f", {"type": "string"})], "tools[0].function.parameters", '"object"'),
        ([function("f", {"type": ["object", "null"]})], "tools[0].function.parameters", '"object"'),
        ([function("f", strict="yes")], "tools[0].function.strict", "true or false"),
        ([function("f", deep(70))], "tools[0].function.parameters", "nested"),
        (
            [function("f", {"properties": {"a": {"not": {}}}}, strict=True)],
            "tools[0].function.parameters.properties.a",
            "not can not",
        ),
        ([function(f"f{index}") for index in range(600)], "tools", "600"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_place(tools: list[Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_tools(tools)

    assert refusal.value.param == param
    assert words in str(refusal.value)
    assert str(refusal.value).startswith(param.partition(".properties")[0])


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function(name) for name in names]}}


@pytest.mark.parametrize(
    ("given", "parallel", "choice"),
    [
        (None, None, ToolSelection("auto", TOOLS)),
        ("auto", False, ToolSelection("auto", TOOLS, is_parallel=False)),
        ("none", True, ToolSelection("none", TOOLS)),
        ("required", True, ToolSelection("required", TOOLS)),
        (function("g"), None, ToolSelection("required", (G,), is_parallel=False)),
        ({"type": "function", "name": "ns.h"}, True, ToolSelection("required", (H,), is_parallel=False)),
        (allowed("auto", "g", "f"), None, ToolSelection("auto", (F, G))),
        (allowed("required", "g"), False, ToolSelection("required", (G,), is_parallel=False)),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            None,
            ToolSelection("auto", (F,)),
        ),
    ],
)
def test_a_choice_is_read(given: Any, parallel: bool | None, choice: ToolSelection) -> None:
    assert read_tool_selection(given, TOOLS, parallel) == choice


def test_without_tools_nothing_is_called() -> None:
    assert (
        read_tool_selection(None, ())
        == read_tool_selection("auto", ())
        == read_tool_selection("none", ())
        == ToolSelection("none", ())
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("any", "must be auto"),
        ({"type": "function"}, "must be auto"),
        (function("h"), "'h', which is not in tools (f, g, ns.h)"),
        (allowed("auto", "h"), "'h'"),
        (allowed("none", "f"), "must be auto"),
        (allowed("required"), "there are none"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["f"]}, "must name a tool"),
    ],
)
def test_a_choice_that_can_not_be_made_is_refused(given: Any, words: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        read_tool_selection(given, TOOLS)

    assert words in str(refusal.value)
    assert (refusal.value.param or "").startswith("tool_choice")


def test_a_call_can_not_be_asked_for_without_tools() -> None:
    with pytest.raises(InvalidRequest, match="send some in tools"):
        read_tool_selection("required", ())
