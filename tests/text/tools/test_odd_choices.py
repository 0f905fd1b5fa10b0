"""An enum's text that would end itself in a family's notation is refused by name; every other one is read as it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest
from walks import accepts, form, vocabulary, walks
from written import FAMILY, calls, function, read, write

from weft.errors import InvalidRequest
from weft.text.tools import ToolSelection, read_tools
from weft.text.tools.arguments import Elements, Pairs, Tags

ENDS = {
    name: notation.close.strip() if isinstance(notation, Tags) else notation.quotes[0]
    for name, family in FAMILY.items()
    if isinstance(notation := family.notation, Tags) or (isinstance(notation, Pairs) and not notation.is_json)
}
ENDS |= {name: family.notation.mark for name, family in FAMILY.items() if isinstance(family.notation, Elements)}
LINES = ["yes\n", "\nyes", "\n", "\n\nyes\n\n", " yes ", "yes", ""]


def tools(values: list[Any], strict: bool = True) -> Any:
    schema = {"type": "object", "properties": {"x": {"enum": values}}, "required": ["x"], "additionalProperties": False}
    return read_tools([function("f", schema, strict=strict)])


@pytest.mark.parametrize("name", ENDS)
def test_a_text_of_a_strict_enum_that_ends_itself_is_refused_by_name(name: str) -> None:
    end = ENDS[name]
    for value in (f"a{end}b", end, f"{end}b"):
        selection = ToolSelection("required", tools(["fine", value]))
        with pytest.raises(InvalidRequest, match="this model's calls can not have the value") as refusal:
            form(name, vocabulary("spelt")).grammar(selection)
        assert json.dumps(value, ensure_ascii=False) in str(refusal.value)
        assert refusal.value.param == "tools[0].function.parameters.properties.x"


@pytest.mark.parametrize("name", ENDS)
def test_without_strict_the_other_texts_are_left(name: str) -> None:
    chosen = tools(["fine", f"a{ENDS[name]}b"], strict=False)

    for text in walks(vocabulary("spelt"), name, ToolSelection("required", chosen, is_parallel=False), 4):
        assert calls(read(FAMILY[name], [text], chosen)) == [("f", {"x": "fine"})]


@pytest.mark.parametrize("kind", ["spelt", "tokens"])
@pytest.mark.parametrize("name", ENDS)
def test_a_text_keeps_its_own_line_breaks(name: str, kind: str) -> None:
    end = ENDS[name]
    begun = [f"a{end[:-1]}", end[:1], f"a{end[:1]}"] if kind == "spelt" else []
    for value in (*LINES, *begun):
        chosen, compiler = tools([value]), vocabulary(kind)
        selection = ToolSelection("required", chosen, is_parallel=False)
        if accepts(compiler, form(name, compiler).grammar(selection), text := write(FAMILY[name], [("f", {"x": value})])):
            assert calls(read(FAMILY[name], [text], chosen)) == [("f", {"x": value})], text
        for text in walks(compiler, name, selection, 4):
            assert calls(read(FAMILY[name], [text], chosen)) == [("f", {"x": value})], text
