"""Grammars that want to hurt: too big, too deep, explosive, endless or empty. Data only, made when asked for.

Each must be refused, or compiled and matched, within the limits; none may take the engine's loop with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any, Literal

Kind = Literal["json_schema", "regex", "choice", "lark"]


@dataclasses.dataclass(frozen=True)
class Attack:
    """A grammar to be refused or survived. `make` gives it as a client would: a schema or choices as data, or a text."""

    name: str
    kind: Kind
    make: Callable[[], Any]


def nested(depth: int, wrap: Callable[[Any], Any], core: Any) -> str:
    """The JSON of `core` wrapped so many times. Text, for Python's own encoder would run out of stack."""
    outer = json.dumps(wrap("\0"))
    before, after = outer.split(json.dumps("\0"))
    return before * depth + json.dumps(core) + after * depth


def word(index: int) -> str:
    return f"value {index:06d} with a tail that makes it long"


def closed(properties: dict[str, Any], required: bool = True) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required else [],
        "additionalProperties": False,
    }


def doubling(keyword: str, depth: int) -> dict[str, Any]:
    """Each definition names the next one twice: a text of n lines that unfolds to 2^n."""
    definitions: dict[str, Any] = {f"d{i}": {keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(depth)}
    return {
        "$ref": "#/$defs/d0",
        "$defs": {**definitions, f"d{depth}": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }


def crossing(branches: int, factors: int) -> dict[str, Any]:
    """allOf of anyOfs: multiplied out it has branches ** factors cases."""
    return {
        "allOf": [
            {"anyOf": [{"properties": {f"p{factor}_{branch}": {"const": branch}}} for branch in range(branches)]}
            for factor in range(factors)
        ],
        "type": "object",
    }


def chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
    """Definitions that lead one to the next."""
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}}


def primes(count: int, below: int) -> list[int]:
    """The largest so many primes."""
    found: list[int] = []
    for number in range(below, 2, -1):
        if len(found) < count and all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            found.append(number)
    return found


def pattern(regex: str) -> dict[str, Any]:
    return {"type": "string", "pattern": regex}


SCHEMAS: dict[str, Callable[[], Any]] = {
    # branches
    "enum of 10,000": lambda: {"enum": [word(index) for index in range(10_000)]},
    "enum of 100,000": lambda: {"enum": [word(index) for index in range(100_000)]},
    "enum of 100,000 integers": lambda: {"enum": list(range(0, 700_000, 7))},
    "enum of 10,000 objects": lambda: {"enum": [{"id": index, "name": word(index)} for index in range(10_000)]},
    "anyOf of 10,000 consts": lambda: {"anyOf": [{"const": word(index)} for index in range(10_000)]},
    "anyOf of 2,000 records": lambda: {"anyOf": [closed({f"p{index}": {"type": "integer"}}) for index in range(2_000)]},
    "anyOf of 2,000 records with one start": lambda: {
        "anyOf": [closed({"a": {"type": "integer"}, f"p{index}": {"type": "integer"}}) for index in range(2_000)]
    },
    "anyOf of 1,000 arrays": lambda: {"anyOf": [{"type": "array", "items": {"const": index}} for index in range(1_000)]},
    "oneOf of 1,000 variants": lambda: {"oneOf": [closed({"kind": {"const": word(index)}}) for index in range(1_000)]},
    # size
    "10,000 required properties": lambda: closed({f"property_{index}": {"type": "integer"} for index in range(10_000)}),
    "10,000 optional properties": lambda: closed(
        {f"property_{index}": {"type": "integer"} for index in range(10_000)}, required=False
    ),
    "10,000 optional properties, open": lambda: {
        "type": "object",
        "properties": {f"p{index}": {"type": "integer"} for index in range(10_000)},
    },
    "1 MB of property names": lambda: closed({f"{index:04d}{'n' * 1000}": {"type": "null"} for index in range(1_000)}),
    "1 MB of definitions": lambda: {
        **closed({f"p{index}": {"$ref": f"#/$defs/d{index}"} for index in range(5_000)}, required=False),
        "$defs": {f"d{index}": {"type": "string", "description": "d" * 150, "maxLength": index % 40} for index in range(5_000)},
    },
    "1 MB of description": lambda: {"type": "integer", "description": "word " * 200_000},
    "1 MB of pattern": lambda: pattern("^(" + "|".join(word(index) for index in range(22_000)) + ")$"),
    "1 MB of pattern, one long text": lambda: pattern("^" + "abcdefghij" * 100_000 + "$"),
    "1 MB of one enum string": lambda: {"enum": ["x" * 1_000_000, "y"]},
    "1 MB of const": lambda: {"const": {f"k{index}": ["v" * 50] * 4 for index in range(4_000)}},
    "1,000 different patterns": lambda: closed(
        {f"p{index}": pattern(f"^[a-z]{{1,{index % 60 + 1}}}-{index}.*z$") for index in range(1_000)}, required=False
    ),
    "5,000 optional properties": lambda: closed(
        {f"property_{index}": {"type": "integer"} for index in range(5_000)}, required=False
    ),
    "7,000 optional properties": lambda: closed({f"p{index}": {"type": "null"} for index in range(7_000)}, required=False),
    "20 objects of 300 optional properties": lambda: closed(
        {f"o{number}": closed({f"p{index}": {"type": "null"} for index in range(300)}, required=False) for number in range(20)}
    ),
    "500 KB of one long pattern": lambda: pattern("^" + "abcdefghij" * 50_000 + "$"),
    "500 KB of one enum string": lambda: {"enum": ["x" * 500_000, "y"]},
    "500 KB of long enum strings": lambda: {"enum": [letter * 50_000 for letter in "abcdefghij"]},
    "100 KB of one enum string": lambda: {"enum": ["x" * 100_000, "y"]},
    "2,000 properties of a format": lambda: closed(
        {f"p{index}": {"type": "string", "format": "email"} for index in range(2_000)}
    ),
    "1,000 properties of different lengths": lambda: closed(
        {f"p{index}": {"type": "string", "pattern": "^[a-z]+( [a-z]+)*$", "maxLength": 50 + index} for index in range(1_000)}
    ),
    "200 properties of five patterns each": lambda: closed(
        {
            f"p{index}": {"allOf": [{"pattern": f"{index}.{{{i}}}[a-f]"} for i in range(5)], "type": "string"}
            for index in range(200)
        }
    ),
    "100 patternProperties": lambda: {
        "type": "object",
        "patternProperties": {f"^p{index}_": {"type": "integer"} for index in range(100)},
    },
    "100 objects of 30 patternProperties": lambda: closed(
        {
            f"o{n}": {"type": "object", "patternProperties": {f"^p{n}_{index}_": {"type": "null"} for index in range(30)}}
            for n in range(100)
        }
    ),
    "30 patternProperties that are hard to tell apart": lambda: {
        "type": "object",
        "patternProperties": {f"^.*a.{{{index + 10}}}b{index}$": {"type": "null"} for index in range(30)},
    },
    "5,000 properties beside 30 patternProperties": lambda: {
        **closed({f"p{index}": {"type": "null"} for index in range(5_000)}),
        "patternProperties": {f"^x{index}_.*y$": {"type": "null"} for index in range(30)},
    },
    "400 patternProperties": lambda: {
        "type": "object",
        "patternProperties": {f"^p{index}_": {"type": "integer"} for index in range(400)},
    },
    # depth
    "objects 90 deep": lambda: nested(90, lambda inner: closed({"a": inner}), {"type": "integer"}),
    "objects 1,000 deep": lambda: nested(1_000, lambda inner: closed({"a": inner}), {"type": "integer"}),
    "arrays 1,000 deep": lambda: nested(1_000, lambda inner: {"type": "array", "items": inner}, {"type": "integer"}),
    "anyOf 1,000 deep": lambda: nested(1_000, lambda inner: {"anyOf": [inner, {"type": "null"}]}, {"type": "integer"}),
    "allOf 100 deep": lambda: nested(100, lambda inner: {"allOf": [inner, {"minimum": 0}]}, {"type": "integer"}),
    "arrays 100,000 deep": lambda: nested(100_000, lambda inner: {"items": inner}, {}),
    # references
    "chain of 5,000 references": lambda: chain(5_000, lambda next_one: next_one),
    "chain of 15,000 references": lambda: chain(15_000, lambda next_one: next_one),
    "chain of 7,000 properties": lambda: chain(7_000, lambda next_one: {"properties": {"a": next_one}}),
    "chain of 8,000 arrays": lambda: chain(8_000, lambda next_one: {"type": "array", "items": next_one}),
    "chain of 8,000 unions": lambda: chain(8_000, lambda next_one: {"anyOf": [{"const": 1}, next_one]}),
    "chain of 8,000 intersections": lambda: chain(8_000, lambda next_one: {"allOf": [{"minimum": 1}, next_one]}),
    "chain of 100 times 50 arrays": lambda: chain(
        100, lambda next_one: json.loads(nested(50, lambda inner: {"items": inner}, next_one))
    ),
    "anyOf doubled 30 times": lambda: doubling("anyOf", 30),
    "allOf doubled 30 times": lambda: doubling("allOf", 30),
    "allOf of anyOfs, 3 to the 10th": lambda: crossing(3, 10),
    "allOf of anyOfs, 10 to the 8th": lambda: crossing(10, 8),
    "records doubled 20 times": lambda: {
        "$ref": "#/$defs/d0",
        "$defs": {
            **{
                f"d{i}": closed({"left": {"$ref": f"#/$defs/d{i + 1}"}, "right": {"$ref": f"#/$defs/d{i + 1}"}})
                for i in range(20)
            },
            "d20": {"type": "integer"},
        },
    },
    "references that intersect themselves": lambda: {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"allOf": [{"$ref": "#/$defs/b"}, {"properties": {"x": {"$ref": "#/$defs/a"}}}]},
            "b": {"properties": {"x": {"$ref": "#/$defs/a"}}},
        },
    },
    # regexes
    "(a+)+": lambda: pattern("^(a+)+$"),
    "(a|a)*": lambda: pattern("^(a|a)*$"),
    "(a|aa)+ nested": lambda: pattern("^((a|aa)+)+$"),
    "a{1,100000}": lambda: pattern("^a{1,100000}$"),
    "(a{1,1000}){1,1000}": lambda: pattern("^(a{1,1000}){1,1000}$"),
    "((a{0,100}){0,100}){0,100}": lambda: pattern("^((a{0,100}){0,100}){0,100}$"),
    "(.{1,1000}x){1,1000}": lambda: pattern("^(.{1,1000}x){1,1000}$"),
    ".*a.{20}": lambda: pattern("^.*a.{20}$"),
    ".*a.{300}": lambda: pattern("^.*a.{300}$"),
    "many .* in a row": lambda: pattern("^" + "".join(f".*{chr(97 + i % 26)}{i}" for i in range(60)) + "$"),
    "alternation of unanchored": lambda: pattern("|".join(f"x{i}.*y{i}" for i in range(300))),
    "intersection of 12 unanchored": lambda: {
        "type": "string",
        "allOf": [{"pattern": f"{chr(97 + i)}.{{3}}{chr(98 + i)}"} for i in range(12)],
    },
    "huge unicode classes": lambda: pattern(r"^[\p{L}\p{N}\p{S}\p{P}]{1,400}$"),
    "huge unicode classes, negated": lambda: pattern(r"^(\P{L}\p{Lu}\p{Ll}[^\p{Greek}\p{Cyrillic}]){1,200}$"),
    "10,000 code points one by one": lambda: pattern("^[" + "".join(chr(0x3400 + 2 * i) for i in range(10_000)) + "]{1,50}$"),
    "case folded": lambda: pattern("^(?i:" + "abcdefghijklmnopqrstuvwxyz" * 40 + ")$"),
    # numbers
    "minLength 10^9": lambda: {"type": "string", "minLength": 10**9},
    "maxLength 10^9": lambda: {"type": "string", "maxLength": 10**9},
    "maxLength 10^5": lambda: {"type": "string", "maxLength": 10**5},
    "minLength 10^5 with a pattern": lambda: {"type": "string", "minLength": 10**5, "pattern": "^(ab|cd)*$"},
    "minLength 10^30": lambda: {"type": "string", "minLength": 10**30},
    "minItems 10^6": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10**6},
    "maxItems 10^6": lambda: {"type": "array", "items": {"type": "integer"}, "maxItems": 10**6},
    "maxItems 10^9 of maxItems 10^9": lambda: {
        "type": "array",
        "maxItems": 10**9,
        "items": {"type": "array", "maxItems": 10**9, "items": {}},
    },
    "maxItems 1,000, four deep": lambda: nested(
        4, lambda inner: {"type": "array", "maxItems": 1_000, "items": inner}, {"type": "integer"}
    ),
    "maxProperties 10^6": lambda: {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 10**6},
    "minimum 1e308": lambda: {"type": "number", "minimum": 1e308},
    "minimum 10^400": lambda: {"type": "integer", "minimum": 10**400},
    "maximum 5e-324": lambda: {"type": "number", "minimum": 0, "maximum": 5e-324},
    "multipleOf 1000003": lambda: {"type": "integer", "multipleOf": 1_000_003},
    "multipleOf 2147483647": lambda: {"type": "integer", "multipleOf": 2_147_483_647},
    "multipleOf of 100 primes": lambda: closed(
        {f"p{prime}": {"type": "integer", "multipleOf": prime} for prime in primes(100, 9_999)}
    ),
    "multipleOf of 8 primes in one": lambda: {"type": "integer", "allOf": [{"multipleOf": prime} for prime in primes(8, 100)]},
    "multipleOf 1e-300": lambda: {"type": "number", "multipleOf": 1e-300},
    "multipleOf 0.0000077 in bounds": lambda: {
        "type": "number",
        "multipleOf": 0.0000077,
        "minimum": -1000.5,
        "maximum": 99999.25,
    },
}

GRAMMARS: dict[str, tuple[Kind, Callable[[], str | list[str]]]] = {
    "regex (a+)+": ("regex", lambda: "(a+)+b"),
    "regex .*a.{300}": ("regex", lambda: "(?s:.*)a(?s:.{300})"),
    "regex (a{1,1000}){1,1000}": ("regex", lambda: "(a{1,1000}){1,1000}"),
    "regex a{1,100000}": ("regex", lambda: "a{1,100000}"),
    "regex of 1 MB": ("regex", lambda: "|".join(word(index) for index in range(22_000))),
    "regex 10,000 groups deep": ("regex", lambda: "(" * 10_000 + "a" + ")" * 10_000),
    "regex that matches nothing": ("regex", lambda: r"[^\s\S]"),
    "regex that is broken": ("regex", lambda: "(["),
    "regex of nothing": ("regex", lambda: ""),
    "choice of 10,000": ("choice", lambda: [word(index) for index in range(10_000)]),
    "choice of 100,000": ("choice", lambda: [word(index) for index in range(100_000)]),
    "choice of one text of 1 MB": ("choice", lambda: ["x" * 1_000_000]),
    "choice of one text of 500 KB": ("choice", lambda: ["x" * 500_000]),
    "choice of a and a thousand times a": ("choice", lambda: ["a" * count for count in range(1, 1_001)]),
    "choice of an empty text": ("choice", lambda: [""]),
    "lark left recursion": ("lark", lambda: 'start: start "a" | "a"'),
    "lark hidden left recursion": ("lark", lambda: 'start: b start "x" | "y"\nb: "" | "z"'),
    "lark ambiguous sum": ("lark", lambda: 'start: e\ne: e "+" e | e "*" e | NUM\nNUM: /[0-9]+/'),
    "lark ambiguous to the bone": ("lark", lambda: 'start: s\ns: s s | s s s | "a" | ""'),
    "lark endless loop of rules": ("lark", lambda: "start: a\na: b\nb: a"),
    "lark of no finite text": ("lark", lambda: 'start: "a" start'),
    "lark empty terminal": ("lark", lambda: "start: T*\nT: /a*/"),
    "lark empty language": ("lark", lambda: r"start: /[^\s\S]/"),
    "lark doubled 30 times": (
        "lark",
        lambda: "start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(30)) + 'r30: "a"',
    ),
    "lark alternatives doubled 30 times": (
        "lark",
        lambda: "start: r0\n" + "".join(f"r{i}: r{i + 1} | r{i + 1}\n" for i in range(30)) + 'r30: "a"',
    ),
    "lark terminals doubled 30 times": (
        "lark",
        lambda: "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(30)) + 'R30: "a"',
    ),
    "lark 10,000 rules": (
        "lark",
        lambda: (
            "start: "
            + " | ".join(f"r{i}" for i in range(10_000))
            + "\n"
            + "".join(f'r{i}: "w{i}" r{(i + 1) % 10_000}?\n' for i in range(10_000))
        ),
    ),
    "lark 35,000 rules in a chain": (
        "lark",
        lambda: "start:r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(35_000)) + 'r35000:"a"',
    ),
    "lark 30,000 terminals in a chain": (
        "lark",
        lambda: "start:R0\n" + "".join(f"R{i}:R{i + 1}\n" for i in range(30_000)) + 'R30000:"a"',
    ),
    "lark 20,000 terminals, one in the next": (
        "lark",
        lambda: "start:R0\n" + "".join(f'R{i}:"w" R{i + 1}?\n' for i in range(20_000)) + 'R20000:"a"',
    ),
    "lark 3,000 overlapping terminals": (
        "lark",
        lambda: (
            "start: ("
            + "|".join(f"T{i}" for i in range(3_000))
            + ")+\n"
            + "".join(f"T{i}: /[a-z]*w{i}[a-z ]*/\n" for i in range(3_000))
        ),
    ),
    "lark intersections in a row": (
        "lark",
        lambda: "start:R0\n" + "".join(f"R{i}: /[a-w]*{chr(97 + i % 20)}[a-w]*/ & R{i + 1}\n" for i in range(300)) + "R300: /.*/",
    ),
    "lark repeat 10^9": ("lark", lambda: 'start: ("a" "b"){1,1000000000}'),
    "lark repeats in repeats": ("lark", lambda: 'start: ((("a" | "b"){1,1000}){1,1000}){1,1000}'),
    "lark missing rule": ("lark", lambda: "start: nowhere"),
    "lark import from elsewhere": ("lark", lambda: '%import "/etc/passwd" (x)\nstart: x'),
    "lark with a hostile schema": ("lark", lambda: 'start: %json {"type": "integer", "multipleOf": 1000003}'),
    "lark with a lenient schema": ("lark", lambda: 'start: %json {"x-guidance": {"lenient": true}, "not": {}}'),
    "lark parentheses 10,000 deep": ("lark", lambda: "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
    "lark of 1 MB": ("lark", lambda: "start: " + " | ".join(json.dumps(word(index)) for index in range(22_000))),
    "gbnf left recursion": ("lark", lambda: 'root ::= root "a" | "a"'),
    "gbnf nested repeats": ("lark", lambda: 'root ::= ((("a"{0,100}){0,100}){0,100}){0,100}'),
}

ATTACKS: list[Attack] = [Attack(name, "json_schema", make) for name, make in SCHEMAS.items()] + [
    Attack(name, kind, make) for name, (kind, make) in GRAMMARS.items()
]
