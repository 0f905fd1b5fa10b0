"""Calls written down by hand, one example for each family, and what must be read in them."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import Any

from weft.api.dialect import decode_arguments
from weft.text.tools import Tool, read_tools
from weft.text.tools.arguments import Elements, Pairs, Tags
from weft.text.tools.call_reader import CallReader, HarmonyReader
from weft.text.tools.families import FAMILIES, Family
from weft.text.types import CallArguments, CallClosed, CallOpened, ContentDelta, Reasoning, Text

FAMILY = {family.name: family for family in FAMILIES}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


POINT = {"type": "object", "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/Point"}}, "required": ["x"]}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "wet": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "at": {"$ref": "#/$defs/Point"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"Point": {**POINT, "additionalProperties": False}},
}
OPTIONAL = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "string"}}, "additionalProperties": False}
TOOLS = read_tools([function("get_weather", WEATHER), function("list-all"), function("set.it", OPTIONAL)])

PARIS = ("get_weather", {"city": "Paris", "days": 3})
ALL = ("list-all", {})

# As the models' own templates write it.
EXAMPLES: dict[str, tuple[str, list[tuple[str, Any]]]] = {
    "hermes": (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list-all", "arguments": {}}\n</tool_call>',
        [PARIS, ALL],
    ),
    "qwen-xml": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=list-all>\n</function>\n</tool_call>",
        [PARIS, ALL],
    ),
    "seed": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n</function>\n"
        "</seed:tool_call>",
        [PARIS],
    ),
    "glm": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>list-all\n</tool_call>",
        [PARIS, ALL],
    ),
    "longcat": (
        "<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n<longcat_arg_value>Paris</longcat_arg_value>\n"
        "<longcat_arg_key>days</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>",
        [PARIS],
    ),
    "hy3": (
        "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>list-all<tool_sep>\n</tool_call>\n</tool_calls>",
        [PARIS, ALL],
    ),
    "hy3-opensource": (
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n<arg_key:opensource>days</arg_key:opensource>\n"
        "<arg_value:opensource>3</arg_value:opensource>\n</tool_call:opensource>\n</tool_calls:opensource>",
        [PARIS],
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="list-all">\n</invoke>\n</minimax:tool_call>',
        [PARIS, ALL],
    ),
    "minimax-m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>Paris]<]minimax[>[</city>'
        "]<]minimax[>[<days>3]<]minimax[>[</days>]<]minimax[>[</invoke>\n"
        ']<]minimax[>[<invoke name="list-all">]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>',
        [PARIS, ALL],
    ),
    "muse": (
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Paris</atem:parameter>\n'
        '<atem:parameter name="days">3</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        [PARIS],
    ),
    "deepseek-v3.2": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        [PARIS],
    ),
    "deepseek-v4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="list-all">\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        [ALL],
    ),
    "deepseek-v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Paris", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>list-all\n```json\n{}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, ALL],
    ),
    "deepseek-v3.1": (
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris", "days": 3}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>list-all<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, ALL],
    ),
    "kimi-k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris", "days": 3}<|tool_call_end|><|tool_call_begin|>functions.list-all:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, ALL],
    ),
    "kimi-k3": (
        '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>'
        'Paris<|close|>argument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        "<|close|>tools<|sep|>",
        [PARIS],
    ),
    "mistral": (
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris", "days": 3}[TOOL_CALLS]list-all[ARGS]{}',
        [PARIS, ALL],
    ),
    "mistral-ids": ('[TOOL_CALLS]get_weather[CALL_ID]aB3dE5gH7[ARGS]{"city": "Paris", "days": 3}', [PARIS]),
    "mistral-list": (
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "aB3dE5gH7"}, '
        '{"name": "list-all", "arguments": {}}]',
        [PARIS, ALL],
    ),
    "phi": (
        '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}]<|/tool_call|>',
        [PARIS],
    ),
    "granite": (
        '<|tool_call|>[\n    {\n        "name": "get_weather",\n        "arguments": {\n            "city": "Paris",\n'
        '            "days": 3\n        }\n    },\n    {\n        "name": "list-all",\n        "arguments": {}\n    }\n]',
        [PARIS, ALL],
    ),
    "granite-20b": (
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '<function_call> {"name": "list-all", "arguments": {}}\n',
        [PARIS, ALL],
    ),
    "tool-calls": (
        '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}, "id": "functions.get_weather:0"}, '
        '{"name": "list-all", "arguments": {}}]</tool_calls>',
        [PARIS, ALL],
    ),
    "minimax-m1": (
        '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}\n'
        '{"name": "list-all", "arguments": {}}\n</tool_calls>',
        [PARIS, ALL],
    ),
    "apertus": (
        '<|tools_prefix|>[{"get_weather": {"city": "Paris", "days": 3}}, {"list-all": {}}]<|tools_suffix|>',
        [PARIS, ALL],
    ),
    "solar": (
        '<|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>{"city": "Paris", "days": 3}'
        "<|tool_call:end|><|tool_call:begin|>f6g7h8i9j0<|tool_call:name|>list-all<|tool_call:args|>{}<|tool_call:end|><|calls|>",
        [PARIS, ALL],
    ),
    "internlm2": (
        '<|action_start|><|plugin|>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}<|action_end|>'
        '<|action_start|><|plugin|>\n{"name": "list-all", "arguments": {}}<|action_end|>',
        [PARIS, ALL],
    ),
    "gigachat3.1": ('<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
    "functionary-v3.1": (
        '<function=get_weather>{"city": "Paris", "days": 3}</function><function=list-all>{}</function>',
        [PARIS, ALL],
    ),
    "minicpm5": (
        '<function name="get_weather"><param name="city"><![CDATA[Paris]]></param><param name="days">3</param></function>\n'
        '<function name="list-all"></function>',
        [PARIS, ALL],
    ),
    "functools": ('functools[{"name": "list-all", "arguments": {}}]', [ALL]),
    "nemotron": ('<TOOLCALL>[{"name": "list-all", "arguments": {}}]</TOOLCALL>', [ALL]),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris", "days": 3}},\n'
        '    {"tool_call_id": "1", "tool_name": "list-all", "parameters": {}}\n]<|END_ACTION|>',
        [PARIS, ALL],
    ),
    "lfm2": ("<|tool_call_start|>[get_weather(city='Paris', days=3), list-all()]<|tool_call_end|>", [PARIS, ALL]),
    "llama4": ('<|python_start|>[get_weather(city="Paris", days=3)]<|python_end|>', [PARIS]),
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:list-all{}<tool_call|>',
        [PARIS, ALL],
    ),
    "function-gemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>",
        [PARIS],
    ),
    "harmony": (
        '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris", "days": 3}<|call|>',
        [PARIS],
    ),
    "llama3": ('{"name": "get_weather", "parameters": {"city": "Paris", "days": 3}}', [PARIS]),
    "json": ('{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
    "json-list": (
        '[{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}, {"name": "list-all", "arguments": {}}]',
        [PARIS, ALL],
    ),
    "pythonic": ("[get_weather(city='Paris', days=3), list-all()]", [PARIS, ALL]),
}


def reader(family: Family, tools: tuple[Tool, ...] = TOOLS, **more: bool) -> CallReader | HarmonyReader:
    """A reader that counts its ids."""
    ids = count()
    make_id = lambda: f"id{next(ids)}"  # noqa: E731 - as short as it is
    return HarmonyReader(tools, make_id) if family.is_harmony else CallReader(family, tools, make_id, **more)


def read(
    family: Family, pieces: list[str], tools: tuple[Tool, ...] = TOOLS, *, is_cut: bool = False, **more: bool
) -> list[ContentDelta]:
    """The deltas of a text in pieces, with neighbours of one kind made one."""
    one = reader(family, tools, **more)
    return joined([delta for piece in pieces for delta in one.feed(piece)] + one.finish(is_cut=is_cut))


def joined(deltas: list[ContentDelta]) -> list[ContentDelta]:
    found: list[ContentDelta] = []
    for delta in deltas:
        match found[-1:], delta:
            case [Text(before)], Text(text):
                found[-1] = Text(before + text)
            case [Reasoning(before)], Reasoning(text):
                found[-1] = Reasoning(before + text)
            case [CallArguments(index, before)], CallArguments(same, text) if index == same:
                found[-1] = CallArguments(index, before + text)
            case _:
                found.append(delta)
    return found


def texts(deltas: list[ContentDelta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Text))


def calls(deltas: list[ContentDelta]) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that were closed."""
    names = {delta.index: delta.name for delta in deltas if isinstance(delta, CallOpened)}
    said = {
        index: "".join(one.text for one in deltas if isinstance(one, CallArguments) and one.index == index) for index in names
    }
    closed = [delta.index for delta in deltas if isinstance(delta, CallClosed)]
    return [(names[index], json.loads(said[index], parse_float=decode_arguments)) for index in closed]


def write(family: Family, called: list[tuple[str, dict[str, Any]]]) -> str:
    """Calls as this family writes them."""
    written = []
    for index, (name, arguments) in enumerate(called):
        length = re.search(r"\{(\d+)}$", family.id_pattern)
        head = family.head.replace("⟨name⟩", name).replace("⟨id⟩", str(index).zfill(int(length[1]) if length else 1))
        written.append(head + written_arguments(family, arguments) + family.tail)
    return family.begin.lstrip() + (family.between or "").join(written) + family.end


def written_arguments(family: Family, arguments: dict[str, Any]) -> str:
    match family.notation:
        case None:
            return json.dumps(arguments, ensure_ascii=False)
        case Tags(opening, close, (text_type, _), _, is_python):
            other = "false" if text_type == "true" else "object"
            kinds = {key: text_type if isinstance(value, str) else other for key, value in arguments.items()}
            tags = {key: opening.replace("⟨key⟩", key).replace("⟨type⟩", kinds[key]) for key in arguments}
            return "".join(
                tags[key] + (value if isinstance(value, str) else repr(value) if is_python else json.dumps(value)) + close
                for key, value in arguments.items()
            )
        case Elements(mark):
            return elements(arguments, mark)
        case Pairs(assign, quotes, is_json):
            return ", ".join(
                f"{key}{assign}{repr(value) if is_json else braced(value, quotes[0])}" for key, value in arguments.items()
            )


def elements(value: Any, mark: str) -> str:
    match value:
        case dict():
            return "".join(f"{mark}<{key}>{elements(one, mark)}{mark}</{key}>" for key, one in value.items())
        case list():
            return "".join(f"{mark}<item>{elements(one, mark)}{mark}</item>" for one in value)
    return value if isinstance(value, str) else json.dumps(value)


def braced(value: Any, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case dict():
            return "{" + ",".join(f"{key}:{braced(one, quote)}" for key, one in value.items()) + "}"
        case list():
            return "[" + ",".join(braced(one, quote) for one in value) + "]"
    return json.dumps(value)
