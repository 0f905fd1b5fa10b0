"""JSON schemas across the whole keyword space, each with what a strict request must get for it: an answer or a refusal.

It is data and a few combinators; it knows no grammar engine. A schema that can not be enforced exactly is marked refused,
with the reason; every other one has instances, and whatever the grammar lets through must be one of them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Literal

Schema = Any  # JSON: an object, true or false


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schema of the corpus. `why` says what can not be enforced in a refused one."""

    name: str
    schema: Schema
    expect: Literal["compiles", "refused"] = "compiles"
    why: str = ""
    is_endless: bool = False  # every value is infinite: the grammar holds, but an answer only ends where its tokens do


# --- combinators -----------------------------------------------------------------------------------------------------


def string(**keywords: Any) -> Schema:
    return {"type": "string", **keywords}


def integer(**keywords: Any) -> Schema:
    return {"type": "integer", **keywords}


def number(**keywords: Any) -> Schema:
    return {"type": "number", **keywords}


def array(items: Schema = None, **keywords: Any) -> Schema:
    return {"type": "array", **({} if items is None else {"items": items}), **keywords}


def record(properties: dict[str, Schema] | None = None, **keywords: Any) -> Schema:
    """A closed object with every property required, as OpenAI's strict mode wants them."""
    names = list(properties or {})
    closed = {"type": "object", "properties": properties or {}, "required": names, "additionalProperties": False}
    return closed | keywords


def partial(properties: dict[str, Schema] | None = None, **keywords: Any) -> Schema:
    """A closed object with every property optional."""
    return record(properties, **{"required": [], **keywords})


def opened(properties: dict[str, Schema] | None = None, **keywords: Any) -> Schema:
    """An object as a schema of few words describes it: other properties may come, none is required."""
    return {"type": "object", **({"properties": properties} if properties else {}), **keywords}


def having(**properties: Schema) -> Schema:
    """An open object with these properties required."""
    return opened(properties, required=list(properties))


def any_of(*branches: Schema, **keywords: Any) -> Schema:
    return {"anyOf": list(branches), **keywords}


def one_of(*branches: Schema, **keywords: Any) -> Schema:
    return {"oneOf": list(branches), **keywords}


def all_of(*branches: Schema, **keywords: Any) -> Schema:
    return {"allOf": list(branches), **keywords}


def ref(name: str, **keywords: Any) -> Schema:
    return {"$ref": f"#/$defs/{name}", **keywords}


def nullable(schema: Schema) -> Schema:
    return any_of(schema, NULL)


NULL = {"type": "null"}
BOOLEAN = {"type": "boolean"}
STRING = string()
INTEGER = integer()
NUMBER = number()
WORD = string(pattern="^[a-z]{1,8}$")
POINT = record({"x": NUMBER, "y": NUMBER})

# --- single keywords -------------------------------------------------------------------------------------------------

TYPES: dict[str, Schema] = {
    "null": NULL,
    "boolean": BOOLEAN,
    "string": STRING,
    "integer": INTEGER,
    "number": NUMBER,
    "array": array(),
    "object": opened(),
    "anything": {},
    "true": True,
    "string or null": {"type": ["string", "null"]},
    "integer or string": {"type": ["integer", "string"]},
    "number or boolean or null": {"type": ["number", "boolean", "null"]},
    "array or object": {"type": ["array", "object"]},
    "every type": {"type": ["null", "boolean", "integer", "number", "string", "array", "object"]},
    "one type in a list": {"type": ["integer"]},
    "type list with bounds of each": {"type": ["string", "integer"], "maxLength": 4, "minimum": 3, "maximum": 30},
    "type list with items": {"type": ["array", "null"], "items": BOOLEAN, "maxItems": 3},
    "type list with properties": {
        "type": ["object", "null"],
        "properties": {"a": INTEGER},
        "required": ["a"],
        "additionalProperties": False,
    },
    "keywords of a type without the type": {"minLength": 3, "maxLength": 5},
    "bounds without the type": {"minimum": 3, "maximum": 5},
    "properties without the type": {"properties": {"a": INTEGER}, "required": ["a"]},
    "items without the type": {"items": INTEGER},
}

LITERALS: dict[str, Schema] = {
    "enum of words": {"enum": ["red", "green", "blue"]},
    "enum with a type": string(enum=["red", "green", "blue"]),
    "enum of one": {"enum": ["only"]},
    "enum of prefixes": {"enum": ["a", "ab", "abc", "abcd"]},
    "enum with an empty word": {"enum": ["", "x"]},
    "enum with spaces": {"enum": ["two words", " leading", "trailing ", "in  between"]},
    "enum that needs escapes": {"enum": ['quote " in', "back \\ slash", "line\nbreak", "tab\there", "slash / in"]},
    "enum of the controls that have a short escape": {"enum": ["\b\f", "\t", "\r\n"]},
    "enum of umlauts": {"enum": ["grün", "weiß", "naïve"]},
    "enum of scripts": {"enum": ["日本語", "русский", "العربية", "हिन्दी"]},
    "enum beyond the basic plane": {"enum": ["🦀", "👩‍👩‍👧", "𝔘", "a🦀b"]},
    "enum of composed and decomposed": {"enum": ["é", "e\u0301"]},
    "enum of integers": {"enum": [0, 1, -1, 42, 1000000]},
    "enum of numbers": {"enum": [0.5, -2.25, 1e-3, 3]},
    "enum of big integers": {"enum": [2**53, -(2**53), 123456789012345]},
    "enum of booleans and null": {"enum": [True, False, None]},
    "enum of every kind": {"enum": ["a", 1, 2.5, None, True, [], {}]},
    "enum of arrays": {"enum": [[], [1], [1, "two", None], [[1], [2]]]},
    "enum of objects": {"enum": [{}, {"a": 1}, {"a": 1, "b": [True]}, {"ü": "ö"}]},
    "enum of words that look like other types": {"enum": ["1", "true", "null", "{}", "[]"]},
    "enum of 100 words": {"enum": [f"value-{index}" for index in range(100)]},
    "enum of 200 integers": {"enum": list(range(0, 2000, 10))},
    "enum cut by its type": {"type": "string", "enum": ["a", 1, None]},
    "enum cut by a length": {"enum": ["a", "abc", "abcde"], "minLength": 2},
    "enum cut by a bound": {"enum": [1, 5, 10, 50], "minimum": 4, "maximum": 20},
    "enum cut by a pattern": string(enum=["ab", "cd", "ax"], pattern="^a"),
    "enum in an array": array({"enum": ["N", "E", "S", "W"]}, maxItems=4),
    "const word": {"const": "fixed"},
    "const empty word": {"const": ""},
    "const with a type": string(const="fixed"),
    "const integer": {"const": 7},
    "const negative": {"const": -7},
    "const float": {"const": 1.5},
    "const null": {"const": None},
    "const true": {"const": True},
    "const false": {"const": False},
    "const array": {"const": [1, [2, 3], {"four": 4}]},
    "const object": {"const": {"kind": "fixed", "list": [1, 2], "deep": {"a": None}}},
    "const empty array": {"const": []},
    "const empty object": {"const": {}},
    "const unicode": {"const": "Ω≈ç√∫˜µ≤≥÷"},
    "const that needs escapes": {"const": 'a"b\\c\nd'},
    "const that looks like markup": {"const": "</answer><|end|>"},
    "const inside an object": record({"version": {"const": 2}, "name": {"const": "x"}}),
}

LENGTHS: dict[str, Schema] = {
    f"{least}..{most}": string(minLength=least, maxLength=most)
    for least, most in [(0, 0), (0, 1), (1, 1), (2, 5), (7, 7), (0, 40), (30, 60), (100, 120)]
} | {
    "at least 1": string(minLength=1),
    "at least 20": string(minLength=20),
    "at most 3": string(maxLength=3),
    "with a pattern": string(pattern="^[a-z]*$", minLength=3, maxLength=6),
    "with an unanchored pattern": string(pattern="[0-9]", minLength=3, maxLength=6),
    "with a pattern at the end": string(pattern="abc$", maxLength=6),
    "with a pattern in the middle": string(pattern="abc", minLength=2, maxLength=8),
    "with a pattern of two anchors": string(pattern="^a|b$", maxLength=6),
    "with a pattern that has its own": string(pattern="^(ab|cd)*$", minLength=5, maxLength=9),
    "with a format": string(format="email", maxLength=30),
    "of characters, not bytes": string(pattern="^[äöü日]+$", minLength=2, maxLength=4),
    "in items": array(string(minLength=1, maxLength=3), minItems=2, maxItems=3),
}

PATTERNS: list[str] = [
    # anchors
    "^abc$",
    "^abc",
    "^$",
    "^(a|b)$",
    "^",
    "$",
    "",
    # classes
    "^[a-z]+$",
    "^[A-Za-z_][A-Za-z0-9_]*$",
    "^[^a-z]{1,5}$",
    r"^\d{3}$",
    r"^\D{2,4}$",
    r"^\w+$",
    r"^\W{1,3}$",
    r"^\s?x\s?$",
    r"^\S{2,6}$",
    r"^[\w.-]+$",
    r"^[\d-]{3,5}$",
    "^.$",
    "^.{3}$",
    "^[.]$",
    r"^[\]\[\\-]+$",
    "^[ -~]{1,10}$",
    # repetition
    "^a*$",
    "^a+b?$",
    "^a{3}$",
    "^a{2,}$",
    "^a{0,3}$",
    "^(ab){2,3}$",
    "^(a{1,2}){1,3}$",
    "^(a|bb|ccc)*$",
    "^a+?b*?$",
    "^([a-z]+ )*[a-z]+$",
    # groups
    "^(?:yes|no|maybe)$",
    "^(?<year>[0-9]{4})-(?<month>[0-9]{2})$",
    "^((a|b)(c|d)){1,2}$",
    "^(|a|ab)c$",
    # escapes
    r"^\$[0-9]+\.[0-9]{2}$",
    r"^\(\d{3}\) \d{3}-\d{4}$",
    r"^C:\\[a-z]+$",
    r'^"[a-z]*"$',
    r"^a\/b$",
    r"^\x41\u0042$",
    r"^\t?a\n?$",
    r"^[\t\n]{1,2}$",
    r"^\u00e9+$",
    # unicode
    "^[äöüß]+$",
    "^[α-ω]{2,5}$",
    "^[\u4e00-\u9fff]{1,4}$",
    "^🦀{1,3}$",
    "^[😀-😎]$",
    r"^\p{Lu}\p{Ll}+$",
    r"^\p{L}{1,5}$",
    r"^\p{Script=Greek}{1,3}$",
    # real ones
    r"^[A-Z]{2}\d{2}[A-Z0-9]{4}\d{7}$",
    r"^#[0-9a-fA-F]{6}$",
    r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)$",
    r"^([01]\d|2[0-3]):[0-5]\d$",
    r"^[a-z0-9]+(-[a-z0-9]+)*$",
    r"^(https?://)?[a-z]+\.(com|org)$",
    r"^[+]?[0-9]{7,15}$",
    r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    r"^-?\d+(\.\d+)?$",
    r"^\{\{[a-z]+\}\}$",
]

FORMATS = ["date", "time", "date-time", "duration", "email", "uuid", "ipv4", "ipv6", "hostname", "uri"]

SPANS = [(0, 0), (0, 9), (1, 10), (5, 17), (-3, 3), (-100, -7), (99, 1001), (0, 255), (12345, 12345), (1000000, 9999999)]
WIDE_SPANS = [(-32768, 32767), (-(2**31), 2**31 - 1), (0, 2**53), (-(2**63), 2**63 - 1)]
FLOAT_SPANS = [(0, 1), (0.5, 0.75), (-1.5, 2.25), (-0.001, 0.001), (10, 1000), (-5.5, -5.25), (0.1, 0.3), (3, 3), (1e-5, 1e-4)]

NUMBERS: dict[str, Schema] = (
    {f"integer {low}..{high}": integer(minimum=low, maximum=high) for low, high in SPANS + WIDE_SPANS}
    | {f"number {low}..{high}": number(minimum=low, maximum=high) for low, high in FLOAT_SPANS}
    | {
        "integer at least": integer(minimum=18),
        "integer at most": integer(maximum=18),
        "integer at least, negative": integer(minimum=-18),
        "integer at most, negative": integer(maximum=-18),
        "integer above": integer(exclusiveMinimum=0),
        "integer below": integer(exclusiveMaximum=0),
        "integer between, exclusive": integer(exclusiveMinimum=3, exclusiveMaximum=6),
        "integer between floats": integer(minimum=1.5, maximum=4.5),
        "integer between exclusive floats": integer(exclusiveMinimum=1.5, exclusiveMaximum=4.5),
        "integer with both minima": integer(minimum=3, exclusiveMinimum=5, maximum=20),
        "integer with both maxima": integer(minimum=0, maximum=5, exclusiveMaximum=9),
        "integer with whole floats as bounds": integer(minimum=1.0, maximum=4.0),
        "integer above what a float holds": integer(minimum=2**53 + 1),
        "integer below what a float holds": integer(maximum=-(2**53) - 1),
        "number at least": number(minimum=2.5),
        "number at most": number(maximum=-2.5),
        "number above": number(exclusiveMinimum=0),
        "number below": number(exclusiveMaximum=1.5),
        "number between, exclusive": number(exclusiveMinimum=0, exclusiveMaximum=1),
        "number between, half open": number(minimum=0, exclusiveMaximum=1),
        "number above a negative": number(exclusiveMinimum=-0.5, maximum=0.5),
        "number with an exponent as bound": number(minimum=1e3, maximum=1.5e3),
        "positive and no more": {"exclusiveMinimum": 0, "type": ["number", "null"]},
    }
    | {f"integer multiple of {step}": integer(multipleOf=step) for step in (1, 2, 3, 7, 10, 25, 100)}
    | {f"number multiple of {step}": number(multipleOf=step) for step in (1, 5, 0.5, 0.25)}
    | {
        "integer multiple within bounds": integer(multipleOf=5, minimum=12, maximum=31),
        "integer multiple of a negative range": integer(multipleOf=4, minimum=-20, maximum=-1),
        "number multiple within bounds": number(multipleOf=0.5, minimum=0, maximum=3),
        "integer multiple of a float": integer(multipleOf=2.5, minimum=0, maximum=100),
    }
)

ARRAYS: dict[str, Schema] = {
    "of integers": array(INTEGER),
    "of anything": array({}),
    "of true": array(True),
    "that is empty": array(maxItems=0),
    "whose items can not be": array(False),
    "of exactly 3": array(INTEGER, minItems=3, maxItems=3),
    "of 2 to 4": array(BOOLEAN, minItems=2, maxItems=4),
    "of at least 2": array(WORD, minItems=2),
    "of at most 1": array(WORD, maxItems=1),
    "of 10 to 12": array(integer(minimum=0, maximum=9), minItems=10, maxItems=12),
    "of nullable": array(nullable(INTEGER), maxItems=4),
    "of type lists": array({"type": ["integer", "null"]}, maxItems=4),
    "of arrays": array(array(INTEGER, maxItems=3), maxItems=3),
    "matrix": array(array(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=2),
    "of arrays of arrays": array(array(array(BOOLEAN, minItems=1), maxItems=2), minItems=1, maxItems=2),
    "of objects": array(POINT, maxItems=3),
    "of enums": array({"enum": [1, 2, 3]}, minItems=1, maxItems=5),
    "of anyOf": array(any_of(INTEGER, WORD, POINT), maxItems=4),
    "pair": array(prefixItems=[INTEGER, WORD], items=False, minItems=2),
    "pair, possibly cut short": array(prefixItems=[INTEGER, WORD], items=False),
    "pair, then anything": array(prefixItems=[INTEGER, WORD]),
    "pair, then booleans": array(BOOLEAN, prefixItems=[INTEGER, WORD]),
    "pair, then up to 2 booleans": array(BOOLEAN, prefixItems=[INTEGER, WORD], minItems=2, maxItems=4),
    "prefix cut by maxItems": array(prefixItems=[INTEGER, WORD, BOOLEAN], maxItems=2),
    "prefix longer than minItems": array(prefixItems=[INTEGER, WORD, BOOLEAN], minItems=1, items=False),
    "prefix with an impossible place": array(prefixItems=[INTEGER, False, WORD]),
    "tuple of tuples": array(prefixItems=[array(prefixItems=[INTEGER], items=False, minItems=1), WORD], items=False, minItems=2),
    "tuple of objects": array(prefixItems=[POINT, record({"label": WORD})], items=False, minItems=2),
    "tuple with an optional tail": array(prefixItems=[WORD, nullable(INTEGER)], items=False, minItems=1),
    "in an object": record({"values": array(INTEGER, minItems=1, maxItems=3), "empty": array(maxItems=0)}),
    "without the type": {"items": INTEGER, "minItems": 2, "maxItems": 3, "type": ["array", "null"]},
}

OBJECTS: dict[str, Schema] = {
    "closed": record({"name": STRING, "age": INTEGER}),
    "closed and empty": record({}),
    "closed, nothing required": partial({"a": INTEGER, "b": WORD, "c": BOOLEAN}),
    "closed, first required": record({"a": INTEGER, "b": WORD, "c": BOOLEAN}, required=["a"]),
    "closed, middle required": record({"a": INTEGER, "b": WORD, "c": BOOLEAN}, required=["b"]),
    "closed, last required": record({"a": INTEGER, "b": WORD, "c": BOOLEAN}, required=["c"]),
    "closed, required in another order": record({"a": INTEGER, "b": WORD, "c": BOOLEAN}, required=["c", "a", "b"]),
    "closed, ten optional": partial({f"p{index}": INTEGER for index in range(10)}),
    "closed, twenty required": record({f"p{index}": BOOLEAN for index in range(20)}),
    "closed, two hundred optional": partial({f"p{index}": BOOLEAN for index in range(200)}),
    "open": opened({"a": INTEGER, "b": WORD}),
    "open, one required": opened({"a": INTEGER, "b": WORD}, required=["b"]),
    "open by word": opened({"a": INTEGER}, required=["a"], additionalProperties=True),
    "open without properties": opened(additionalProperties=True),
    "required without properties": opened(required=["a", "b"]),
    "required of the rest's type": opened({"a": INTEGER}, required=["b"], additionalProperties=WORD),
    "map of integers": opened(additionalProperties=INTEGER),
    "map of lists": opened(additionalProperties=array(WORD, maxItems=2)),
    "map of maps": opened(additionalProperties=opened(additionalProperties=INTEGER)),
    "map of records": opened(additionalProperties=POINT),
    "map beside properties": opened({"total": INTEGER}, required=["total"], additionalProperties=number(minimum=0)),
    "rest is anything": opened({"a": INTEGER}, additionalProperties={}),
    "pattern": opened(patternProperties={"^x-": WORD}, additionalProperties=False),
    "pattern and the rest": opened(patternProperties={"^x-": WORD}, additionalProperties=INTEGER),
    "pattern beside properties": opened(
        {"id": INTEGER}, required=["id"], patternProperties={"^tag_": WORD}, additionalProperties=False
    ),
    "patterns apart": opened(patternProperties={"^n_": INTEGER, "^s_": WORD}, additionalProperties=False),
    "pattern that meets a property": opened(
        {"x1": INTEGER}, patternProperties={"^x": integer(minimum=5)}, additionalProperties=False
    ),
    "pattern of digits": opened(patternProperties={r"^\d{1,3}$": BOOLEAN}, additionalProperties=False),
    "pattern and a closed rest and required": opened(
        patternProperties={"^k": INTEGER}, required=["k1"], additionalProperties=False
    ),
    "unicode names": record({"größe": INTEGER, "名前": WORD, "🦀": BOOLEAN}),
    "names that need escapes": record({'a"b': INTEGER, "c\\d": WORD, "e\nf": BOOLEAN, "g/h": NULL, "\t": NULL}),
    "odd names": record({"": INTEGER, " ": WORD, "$ref": BOOLEAN, "type": NULL, "a.b": NULL, "a b": NULL, "-": NULL}),
    "names like keywords": record({"properties": INTEGER, "required": WORD, "enum": BOOLEAN, "const": NULL, "items": NULL}),
    "names that are prefixes": partial({"a": INTEGER, "ab": INTEGER, "abc": INTEGER}),
    "long name": record({"a" * 200: INTEGER}),
    "names not in order of the alphabet": record({"z": INTEGER, "m": INTEGER, "a": INTEGER}),
    "nested three deep": record({"a": record({"b": record({"c": INTEGER})})}),
    "nested with optional": partial({"a": partial({"b": partial({"c": INTEGER})})}),
    "nested ten deep": {},  # filled below
    "property that may be anything": record({"payload": {}}),
    "property true": record({"payload": True}),
    "optional property false": opened({"never": False, "a": INTEGER}, additionalProperties=False),
    "optional property false in an open one": opened({"never": False}),
    "map with at least 1": opened(additionalProperties=INTEGER, minProperties=1),
    "map with at most 1": opened(additionalProperties=INTEGER, maxProperties=1),
    "map with none": opened(maxProperties=0),
    "map with at most 3": opened(additionalProperties=INTEGER, maxProperties=3),
    "map with one beside the required": opened({"a": INTEGER}, required=["a"], additionalProperties=INTEGER, minProperties=2),
    "records with a count that always holds": record({"a": INTEGER, "b": INTEGER}, minProperties=1, maxProperties=5),
    "one of many optional": partial({"a": INTEGER, "b": INTEGER, "c": INTEGER}, minProperties=1),
}
deep: Schema = INTEGER
for _ in range(10):
    deep = record({"inner": deep})
OBJECTS["nested ten deep"] = deep

# --- combinations ----------------------------------------------------------------------------------------------------

KIND = "kind"


def variant(kind: str, **properties: Schema) -> Schema:
    """One branch of a union that is told apart by its property `kind`."""
    return record({KIND: {"const": kind}, **properties})


COMBINED: dict[str, Schema] = {
    "anyOf of types": any_of(INTEGER, STRING, NULL),
    "anyOf of one": any_of(WORD),
    "anyOf of ranges": any_of(integer(minimum=0, maximum=9), integer(minimum=100, maximum=109)),
    "anyOf of patterns": any_of(string(pattern="^a+$"), string(pattern="^b+$")),
    "anyOf of overlapping": any_of(integer(minimum=0, maximum=9), integer(minimum=5, maximum=15)),
    "anyOf of records": any_of(record({"a": INTEGER}), record({"b": WORD})),
    "anyOf of records with a common start": any_of(record({"a": INTEGER, "b": WORD}), record({"a": INTEGER, "c": WORD})),
    "anyOf of variants": any_of(variant("circle", radius=NUMBER), variant("square", side=NUMBER)),
    "anyOf of arrays": any_of(array(INTEGER, minItems=1), array(WORD, minItems=1)),
    "anyOf with true": any_of(INTEGER, True),
    "anyOf with false": any_of(INTEGER, False),
    "anyOf nested": any_of(any_of(INTEGER, NULL), any_of(WORD, BOOLEAN)),
    "anyOf beside a type": any_of({"minimum": 3, "maximum": 5}, {"minimum": 30, "maximum": 50}, type="integer"),
    "anyOf beside properties": opened(
        {"a": INTEGER, "b": WORD}, additionalProperties=False, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
    "anyOf of required beside open properties": opened(
        {"a": INTEGER, "b": WORD}, anyOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
    "anyOf beside a length": any_of({"pattern": "^a"}, {"pattern": "^b"}, type="string", minLength=2, maxLength=5),
    "anyOf of consts": any_of({"const": "a"}, {"const": 1}, {"const": None}),
    "anyOf of enums": any_of({"enum": ["a", "b"]}, {"enum": [1, 2]}),
    "anyOf of 30": any_of(*({"const": f"choice {index}"} for index in range(30))),
    "nullable integer": nullable(INTEGER),
    "nullable record": nullable(POINT),
    "nullable array": nullable(array(INTEGER, maxItems=2)),
    "nullable enum": nullable({"enum": ["a", "b"]}),
    "nullable enum with null in it": {"type": ["string", "null"], "enum": ["a", "b", None]},
    "oneOf of types": one_of(INTEGER, STRING),
    "oneOf of one": one_of(INTEGER),
    "oneOf of consts": one_of({"const": "a"}, {"const": "b"}),
    "oneOf of variants": one_of(variant("cat", lives=INTEGER), variant("dog", bark=BOOLEAN), variant("fish", fins=INTEGER)),
    "oneOf of open variants": one_of(
        opened({KIND: {"const": "a"}}, required=[KIND]), opened({KIND: {"const": "b"}, "more": INTEGER}, required=[KIND])
    ),
    "oneOf with enum discriminators": one_of(
        record({KIND: {"enum": ["a", "b"]}, "x": INTEGER}), record({KIND: {"enum": ["c"]}, "y": INTEGER})
    ),
    "oneOf of array and object": one_of(array(INTEGER), POINT),
    "oneOf of nullable": one_of(NULL, WORD),
    "oneOf of ranges apart": one_of(integer(maximum=0), integer(minimum=10)),
    "oneOf of enums apart": one_of({"enum": ["a", "b"]}, {"enum": ["c", 1]}),
    "oneOf with false": one_of(INTEGER, False),
    "allOf of one": all_of(INTEGER),
    "allOf of bounds": all_of(integer(minimum=3), integer(maximum=9)),
    "allOf beside bounds": all_of({"minimum": 3}, type="integer", maximum=9),
    "allOf of records": all_of(having(a=INTEGER), having(b=WORD)),
    "allOf of records with a common property": all_of(
        opened({"a": integer(minimum=0)}, required=["a"]), opened({"a": integer(maximum=5)}, additionalProperties=False)
    ),
    "allOf of closed and open": all_of(record({"a": INTEGER}), opened({"a": integer(maximum=5)})),
    "allOf of lengths": all_of(string(minLength=2), string(maxLength=4)),
    "allOf of patterns": all_of(string(pattern="^a"), string(pattern="z$"), string(maxLength=10)),
    "allOf of a pattern and a format": all_of(string(format="date"), string(pattern="^20")),
    "allOf of types": all_of({"type": ["integer", "string"]}, {"type": ["string", "null"]}),
    "allOf of number and integer": all_of(NUMBER, INTEGER, {"minimum": 0}),
    "allOf of enums": all_of({"enum": [1, 2, 3]}, {"enum": [2, 3, 4]}),
    "allOf of enum and bound": all_of({"enum": [1, 20, 300]}, {"minimum": 10}),
    "allOf of arrays": all_of(array(INTEGER, minItems=1), array({"minimum": 0}, maxItems=3)),
    "allOf of prefixes": all_of(array(prefixItems=[INTEGER], minItems=2), array(prefixItems=[True, WORD], items=False)),
    "allOf of multiples": all_of(integer(multipleOf=2), integer(multipleOf=3), {"minimum": 0, "maximum": 30}),
    "allOf with true": all_of(True, INTEGER),
    "allOf empty": {"type": "integer", "allOf": [{}]},
    "allOf of anyOf": all_of(any_of(INTEGER, WORD), any_of(WORD, BOOLEAN)),
    "anyOf of allOf": any_of(all_of(integer(minimum=1), {"maximum": 2}), all_of(string(minLength=1), {"maxLength": 2})),
    "allOf of required": opened(
        {"a": INTEGER, "b": WORD}, additionalProperties=False, allOf=[{"required": ["a"]}, {"required": ["b"]}]
    ),
    "allOf adds properties before": all_of(having(z=INTEGER), properties={"a": WORD}, required=["a"]),
    "allOf adds properties after": {"properties": {"a": WORD}, "required": ["a"], "allOf": [having(z=INTEGER)]},
    "allOf of nested records": all_of(
        opened({"in": having(a=INTEGER)}, required=["in"]), opened({"in": having(b=WORD)}, required=["in"])
    ),
}


def defined(root: Schema, **definitions: Schema) -> Schema:
    return {**root, "$defs": definitions}


TREE = record({"value": INTEGER, "children": array(ref("tree"), maxItems=2)})
LIST = record({"head": WORD, "tail": nullable(ref("list"))})
JSON_IN_JSON = any_of(NULL, BOOLEAN, NUMBER, STRING, array(ref("json")), opened(additionalProperties=ref("json")))
EXPRESSION = any_of(
    record({"number": INTEGER}), record({"operator": {"enum": ["+", "*"]}, "left": ref("expression"), "right": ref("expression")})
)

REFERENCES: dict[str, Schema] = {
    "to a definition": defined(ref("count"), count=integer(minimum=0)),
    "to definitions": {"$ref": "#/definitions/count", "definitions": {"count": integer(minimum=0)}},
    "twice to the same": defined(record({"from": ref("point"), "to": ref("point")}), point=POINT),
    "through another": defined(ref("first"), first=ref("second"), second=WORD),
    "in items": defined(array(ref("point"), maxItems=2), point=POINT),
    "in anyOf": defined(any_of(ref("point"), ref("word")), point=POINT, word=WORD),
    "in oneOf": defined(one_of(ref("a"), ref("b")), a=variant("a", x=INTEGER), b=variant("b", y=INTEGER)),
    "in allOf": defined(all_of(ref("base"), having(b=WORD)), base=having(a=INTEGER)),
    "in additionalProperties": defined(opened(additionalProperties=ref("point")), point=POINT),
    "in patternProperties": defined(opened(patternProperties={"^p": ref("point")}, additionalProperties=False), point=POINT),
    "in prefixItems": defined(array(prefixItems=[ref("word"), ref("word")], items=False, minItems=2), word=WORD),
    "with a description beside": defined(record({"a": ref("word", description="a word", title="A")}), word=WORD),
    "with a bound beside": defined(ref("count", maximum=9), count=integer(minimum=3)),
    "with a length beside": defined(ref("text", minLength=2), text=string(maxLength=4)),
    "with properties beside": defined(ref("base", properties={"b": WORD}, required=["b"]), base=having(a=INTEGER)),
    "with a null default beside": defined(record({"a": nullable(ref("word"))}), word=WORD),
    "to a property": record({"a": integer(minimum=5), "b": {"$ref": "#/properties/a"}}),
    "to a branch": any_of(record({"a": INTEGER}), array({"$ref": "#/anyOf/0"}, maxItems=2)),
    "to a name with a slash": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": INTEGER}},
    "to a name with a tilde": {"$ref": "#/$defs/a~0b", "$defs": {"a~b": INTEGER}},
    "to a name with a space": {"$ref": "#/$defs/a%20b", "$defs": {"a b": INTEGER}},
    "to a unicode name": {"$ref": "#/$defs/gr%C3%B6%C3%9Fe", "$defs": {"größe": INTEGER}},
    "to an anchor": {"$ref": "#here", "$defs": {"x": integer(minimum=3) | {"$anchor": "here"}}},
    "below an id": {"$id": "https://example.org/root", **defined(ref("word"), word=WORD)},
    "definitions nobody uses": {**INTEGER, "$defs": {"unused": STRING}},
    "tree": defined(ref("tree"), tree=TREE),
    "tree at the root": record({"value": INTEGER, "children": array({"$ref": "#"}, maxItems=2)}),
    "tree in a property": defined(record({"root": ref("tree"), "name": WORD}), tree=TREE),
    "binary tree": defined(ref("node"), node=record({"left": nullable(ref("node")), "right": nullable(ref("node"))})),
    "linked list": defined(ref("list"), list=LIST),
    "linked list with an optional tail": defined(
        ref("list"), list=record({"head": WORD, "tail": ref("list")}, required=["head"])
    ),
    "JSON in JSON": defined(ref("json"), json=JSON_IN_JSON),
    "JSON in a property": defined(record({"payload": ref("json")}), json=JSON_IN_JSON),
    "arrays all the way": defined(ref("nest"), nest=array(ref("nest"))),
    "maps all the way": defined(ref("nest"), nest=opened(additionalProperties=ref("nest"))),
    "expression": defined(ref("expression"), expression=EXPRESSION),
    "two that call each other": defined(
        ref("folder"),
        folder=record({"name": WORD, "entries": array(any_of(ref("file"), ref("folder")), maxItems=2)}),
        file=record({"name": WORD, "parent": nullable(ref("folder"))}),
    ),
    "recursion through allOf": defined(ref("node"), node=all_of(having(value=INTEGER), opened({"next": ref("node")}))),
}

# --- annotations and dialects ----------------------------------------------------------------------------------------

ANNOTATIONS: dict[str, Schema] = {
    "title and description": integer(title="Count", description="How many."),
    "default and examples": string(default="x", examples=["y", "z"]),
    "default that does not fit": integer(default="none", minimum=3),
    "deprecated, readOnly, writeOnly": string(deprecated=True, readOnly=True, writeOnly=False),
    "comment": string(**{"$comment": "nothing"}),
    "keywords of nobody": string(**{"x-order": 3, "exampleSetFlag": True, "markdownDescription": "m"}),
    "dialect 2020-12": integer(**{"$schema": "https://json-schema.org/draft/2020-12/schema"}),
    "dialect 2019-09": integer(**{"$schema": "https://json-schema.org/draft/2019-09/schema"}),
    "dialect 7": record({"a": INTEGER}, **{"$schema": "http://json-schema.org/draft-07/schema#"}),
    "dialect 6": record({"a": INTEGER}, **{"$schema": "http://json-schema.org/draft-06/schema#"}),
    "dialect 7 with definitions": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **record({"a": {"$ref": "#/definitions/b"}}),
        "definitions": {"b": WORD},
    },
    "dialect 7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **array([INTEGER, WORD], additionalItems=False, minItems=2),
    },
    "dialect 7 tuple with a tail": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **array([INTEGER, WORD], additionalItems=BOOLEAN),
    },
}

# --- realistic ones --------------------------------------------------------------------------------------------------


def pydantic(title: str, properties: dict[str, Schema], required: list[str], **definitions: Schema) -> Schema:
    """A schema as pydantic writes it: titles everywhere, open, defaults, definitions at the side."""
    titled = {name: {"title": name.replace("_", " ").title(), **schema} for name, schema in properties.items()}
    schema = {"properties": titled, "required": required, "title": title, "type": "object"}
    return {"$defs": definitions, **schema} if definitions else schema


def optional(schema: Schema, default: Any = None) -> Schema:
    """A field with a default, as pydantic writes `T | None = None`."""
    return {"anyOf": [schema, NULL], "default": default}


ADDRESS = record(
    {"street": STRING, "city": STRING, "postcode": string(pattern=r"^\d{5}$"), "country": string(minLength=2, maxLength=2)}
)
PERSON = record({"first_name": STRING, "last_name": STRING, "born": nullable(string(format="date"))})
STEP = record({"explanation": STRING, "output": STRING})

REALISTIC: dict[str, Schema] = {
    # tool arguments
    "tool: weather": record(
        {"location": string(description="City"), "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}
    ),
    "tool: weather, optional unit": opened(
        {"location": STRING, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}}, required=["location"]
    ),
    "tool: no arguments": record({}),
    "tool: no arguments, open": {"type": "object", "properties": {}},
    "tool: search": record({"query": string(minLength=1), "limit": integer(minimum=1, maximum=50)}, required=["query"]),
    "tool: shell": record(
        {"command": array(STRING, minItems=1), "timeout_ms": nullable(integer(minimum=0)), "workdir": nullable(STRING)}
    ),
    "tool: edit file": record({"path": STRING, "old_text": STRING, "new_text": STRING, "replace_all": BOOLEAN}),
    "tool: read file": record({"path": STRING, "offset": integer(minimum=0), "limit": integer(minimum=1)}, required=["path"]),
    "tool: todo list": record(
        {
            "todos": array(
                record({"content": string(minLength=1), "status": {"enum": ["pending", "in_progress", "completed"]}}), maxItems=3
            )
        }
    ),
    "tool: create event": record(
        {
            "title": STRING,
            "start": string(format="date-time"),
            "end": string(format="date-time"),
            "attendees": array(string(format="email"), maxItems=2),
            "reminders": array({"enum": [5, 10, 30, 60]}, maxItems=2),
        }
    ),
    "tool: ask user": record(
        {
            "question": STRING,
            "options": array(record({"label": string(maxLength=20), "description": STRING}), minItems=2, maxItems=4),
        }
    ),
    "tool: sql": record(
        {"statement": STRING, "parameters": array({"type": ["string", "number", "boolean", "null"]}, maxItems=3)}
    ),
    "tool: one of several": any_of(
        record({"name": {"const": "get_time"}, "arguments": record({"zone": STRING})}),
        record({"name": {"const": "add"}, "arguments": record({"a": NUMBER, "b": NUMBER})}),
    ),
    "tool: list of calls": array(record({"name": {"enum": ["a", "b"]}, "arguments": opened()}), minItems=1, maxItems=2),
    # API bodies
    "api: user": record(
        {"id": string(format="uuid"), "email": string(format="email"), "roles": array({"enum": ["admin", "user"]}, maxItems=2)}
    ),
    "api: order": record(
        {
            "order_id": string(pattern=r"^ORD-\d{6}$"),
            "lines": array(
                record(
                    {
                        "sku": string(pattern="^[A-Z0-9]{4,8}$"),
                        "quantity": integer(minimum=1, maximum=99),
                        "price": number(minimum=0),
                    }
                ),
                minItems=1,
                maxItems=3,
            ),
            "ship_to": ADDRESS,
            "note": nullable(STRING),
        }
    ),
    "api: page of results": record(
        {
            "items": array(record({"id": INTEGER, "name": STRING}), maxItems=3),
            "next": nullable(STRING),
            "total": integer(minimum=0),
        }
    ),
    "api: problem": record(
        {"type": string(format="uri"), "title": STRING, "status": integer(minimum=400, maximum=599), "detail": STRING}
    ),
    "api: config": partial(
        {
            "log_level": {"enum": ["debug", "info", "warning", "error"]},
            "port": integer(minimum=1, maximum=65535),
            "hosts": array(string(format="hostname"), maxItems=2),
            "features": opened(additionalProperties=BOOLEAN),
        }
    ),
    "api: geojson": one_of(
        record({"type": {"const": "Point"}, "coordinates": array(NUMBER, minItems=2, maxItems=3)}),
        record(
            {"type": {"const": "LineString"}, "coordinates": array(array(NUMBER, minItems=2, maxItems=2), minItems=2, maxItems=3)}
        ),
    ),
    "api: patch": array(
        any_of(
            record({"op": {"enum": ["add", "replace"]}, "path": string(pattern="^(/[a-z]+)*$"), "value": {}}),
            record({"op": {"const": "remove"}, "path": string(pattern="^(/[a-z]+)*$")}),
        ),
        maxItems=2,
    ),
    "api: webhook": record(
        {
            "event": {"enum": ["created", "deleted"]},
            "at": string(format="date-time"),
            "source": string(format="ipv4"),
            "data": any_of(PERSON, ADDRESS),
        }
    ),
    "api: graph": defined(
        record(
            {
                "nodes": array(ref("node"), maxItems=3),
                "edges": array(array(integer(minimum=0), minItems=2, maxItems=2), maxItems=3),
            }
        ),
        node=record({"id": integer(minimum=0), "label": WORD}),
    ),
    # extraction
    "extract: person": PERSON,
    "extract: people": record({"people": array(PERSON, maxItems=3)}),
    "extract: invoice": record(
        {
            "number": STRING,
            "date": string(format="date"),
            "currency": {"enum": ["EUR", "USD", "GBP"]},
            "total": number(minimum=0),
            "lines": array(record({"text": STRING, "amount": NUMBER}), maxItems=3),
            "paid": BOOLEAN,
        }
    ),
    "extract: sentiment": record(
        {"label": {"enum": ["positive", "neutral", "negative"]}, "confidence": number(minimum=0, maximum=1)}
    ),
    "extract: entities": array(
        record({"text": STRING, "type": {"enum": ["PER", "ORG", "LOC"]}, "start": integer(minimum=0), "end": integer(minimum=0)}),
        maxItems=3,
    ),
    "extract: recipe": record(
        {
            "name": string(maxLength=60),
            "servings": integer(minimum=1, maximum=20),
            "ingredients": array(
                record({"name": STRING, "amount": nullable(NUMBER), "unit": nullable({"enum": ["g", "ml", "piece"]})}),
                minItems=1,
                maxItems=3,
            ),
            "steps": array(STRING, minItems=1, maxItems=3),
        }
    ),
    "extract: resume": record(
        {
            "name": STRING,
            "contact": record(
                {"email": nullable(string(format="email")), "phone": nullable(string(pattern=r"^\+?[0-9 ]{7,15}$"))}
            ),
            "skills": array(record({"name": STRING, "years": number(minimum=0, maximum=60)}), maxItems=3),
        }
    ),
    "extract: classification of several": record(
        {"labels": array({"enum": ["a", "b", "c"]}, minItems=1, maxItems=3), "reason": STRING}
    ),
    "extract: yes or no": record({"answer": {"enum": ["yes", "no"]}}),
    "extract: table": record(
        {
            "columns": array(WORD, minItems=1, maxItems=3),
            "rows": array(array({"type": ["string", "number"]}, maxItems=3), maxItems=2),
        }
    ),
    # OpenAI strict style
    "strict: math steps": record({"steps": array(STEP, maxItems=3), "final_answer": STRING}),
    "strict: math steps by reference": defined(
        record({"steps": array(ref("step"), maxItems=2), "final_answer": STRING}), step=STEP
    ),
    "strict: user interface": defined(
        ref("element"),
        element=record(
            {
                "type": {"type": "string", "enum": ["div", "button", "section"]},
                "label": STRING,
                "children": array(ref("element"), maxItems=2),
                "attributes": array(record({"name": STRING, "value": STRING}), maxItems=2),
            }
        ),
    ),
    "strict: nullable instead of optional": record(
        {"name": STRING, "nickname": {"type": ["string", "null"]}, "age": {"type": ["integer", "null"]}}
    ),
    "strict: union of answers": record(
        {
            "result": any_of(
                record({"kind": {"type": "string", "const": "ok"}, "value": NUMBER}),
                record({"kind": {"type": "string", "const": "error"}, "message": STRING}),
            )
        }
    ),
    "strict: moderation": record(
        {
            "flagged": BOOLEAN,
            "categories": record(dict.fromkeys(("hate", "violence", "self_harm"), BOOLEAN)),
            "note": {"type": ["string", "null"]},
        }
    ),
    "strict: thoughts then tool": record(
        {"thought": string(maxLength=80), "tool": {"enum": ["search", "finish"]}, "input": nullable(record({"query": STRING}))}
    ),
    # pydantic style
    "pydantic: flat": pydantic(
        "User", {"name": STRING, "age": INTEGER, "is_admin": {**BOOLEAN, "default": False}}, ["name", "age"]
    ),
    "pydantic: optional": pydantic(
        "Item", {"name": STRING, "price": optional(NUMBER), "tags": {**array(STRING), "default": []}}, ["name"]
    ),
    "pydantic: nested": pydantic(
        "Order", {"user": ref("User"), "note": optional(STRING)}, ["user"], User=pydantic("User", {"name": STRING}, ["name"])
    ),
    "pydantic: enum": pydantic(
        "Paint", {"color": ref("Color")}, ["color"], Color={"enum": ["red", "green"], "title": "Color", "type": "string"}
    ),
    "pydantic: list of models": pydantic(
        "Team", {"members": array(ref("M"), maxItems=2)}, ["members"], M=pydantic("M", {"id": INTEGER}, ["id"])
    ),
    "pydantic: optional model": pydantic(
        "Outer", {"inner": optional(ref("Inner"))}, [], Inner=pydantic("Inner", {"x": INTEGER}, ["x"])
    ),
    "pydantic: constrained": pydantic(
        "Rated",
        {
            "score": number(minimum=0, maximum=5),
            "code": string(pattern="^[A-Z]{3}$"),
            "many": array(INTEGER, minItems=1, maxItems=2),
        },
        ["score", "code", "many"],
    ),
    "pydantic: dict": pydantic("Counts", {"counts": opened(additionalProperties=INTEGER)}, ["counts"]),
    "pydantic: literal": pydantic(
        "Event",
        {"kind": {"const": "event", "type": "string"}, "level": {"enum": [1, 2, 3], "type": "integer"}},
        ["kind", "level"],
    ),
    "pydantic: tuple": pydantic("Pair", {"pair": array(prefixItems=[INTEGER, STRING], minItems=2, maxItems=2)}, ["pair"]),
    "pydantic: union": pydantic("Either", {"value": {"anyOf": [INTEGER, STRING, array(INTEGER)]}}, ["value"]),
    "pydantic: forbids extra": pydantic("Strict", {"a": INTEGER, "b": optional(STRING)}, ["a"]) | {"additionalProperties": False},
    "pydantic: datetime and uuid": pydantic(
        "Row", {"id": string(format="uuid"), "at": string(format="date-time"), "day": string(format="date")}, ["id", "at", "day"]
    ),
    "pydantic: discriminated": pydantic(
        "Pet",
        {"pet": {"oneOf": [ref("Cat"), ref("Dog")], "discriminator": {"propertyName": "kind"}}},
        ["pet"],
        Cat=pydantic("Cat", {"kind": {"const": "cat", "type": "string"}, "lives": INTEGER}, ["kind", "lives"]),
        Dog=pydantic("Dog", {"kind": {"const": "dog", "type": "string"}, "tail": BOOLEAN}, ["kind", "tail"]),
    ),
    "pydantic: self reference": {
        "$ref": "#/$defs/Node",
        "$defs": {"Node": pydantic("Node", {"value": INTEGER, "next": optional(ref("Node"))}, ["value"])},
    },
}

ENDLESS: dict[str, Schema] = {
    "record that holds itself": defined(ref("node"), node=record({"next": ref("node")})),
    "array that must hold itself": defined(ref("nest"), nest=array(ref("nest"), minItems=1)),
}

# --- what can not be enforced ----------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Schema]] = {
    "`not` is not enforced": {
        "not": string(**{"not": {"const": "a"}}),
        "not in a property": record({"a": {"not": STRING}}),
        "not empty": {"not": {}},
        "not in anyOf": any_of(INTEGER, {"not": STRING}),
    },
    "conditions are not enforced": {
        "if then": integer(**{"if": {"minimum": 3}, "then": {"multipleOf": 2}}),
        "if else": integer(**{"if": {"minimum": 3}, "else": {"multipleOf": 2}}),
        "if then else on properties": opened(
            {"country": WORD, "code": WORD},
            **{"if": {"properties": {"country": {"const": "us"}}}, "then": {"required": ["code"]}, "else": {}},
        ),
        "dependentRequired": opened({"a": INTEGER, "b": INTEGER}, dependentRequired={"a": ["b"]}),
        "dependentSchemas": opened({"a": INTEGER}, dependentSchemas={"a": {"required": ["b"]}}),
        "dependencies": opened({"a": INTEGER}, dependencies={"a": ["b"]}),
    },
    "items are not compared or counted": {
        "uniqueItems": array(INTEGER, uniqueItems=True),
        "uniqueItems in a property": record({"tags": array(WORD, uniqueItems=True)}),
        "contains": array(INTEGER, contains={"const": 1}),
        "contains with counts": array(INTEGER, contains={"const": 1}, minContains=2, maxContains=3),
    },
    "names are not checked against a schema": {
        "propertyNames pattern": opened(propertyNames={"pattern": "^[a-z]+$"}),
        "propertyNames enum": opened(propertyNames={"enum": ["a", "b"]}, additionalProperties=INTEGER),
    },
    "unevaluated members are not known": {
        "unevaluatedProperties false": all_of(opened({"a": INTEGER}), unevaluatedProperties=False),
        "unevaluatedProperties schema": opened({"a": INTEGER}, unevaluatedProperties=STRING),
        "unevaluatedItems": array(prefixItems=[INTEGER], unevaluatedItems=False),
    },
    "branches of oneOf overlap": {
        "oneOf integer and number": one_of(INTEGER, NUMBER),
        "oneOf overlapping ranges": one_of(integer(minimum=0, maximum=9), integer(minimum=5, maximum=15)),
        "oneOf the same twice": one_of(STRING, STRING),
        "oneOf patterns not seen to be apart": one_of(string(pattern="^a"), string(pattern="^b")),
        "oneOf overlapping patterns": one_of(string(pattern="^a"), string(pattern="z$")),
        "oneOf records without a difference": one_of(opened({"a": INTEGER}), opened({"b": INTEGER})),
        "oneOf enums with a common value": one_of({"enum": ["a", "b"]}, {"enum": ["b", "c"]}),
        "oneOf with true": one_of(INTEGER, True),
        "oneOf of required": opened({"a": INTEGER, "b": INTEGER}, oneOf=[{"required": ["a"]}, {"required": ["b"]}]),
    },
    "members are not counted": {
        "minProperties of a map, where keys may repeat": opened(additionalProperties=INTEGER, minProperties=2),
        "minProperties beyond the required": opened({"a": INTEGER}, required=["a"], minProperties=4),
        "minProperties with optional": partial({"a": INTEGER, "b": INTEGER, "c": INTEGER}, minProperties=2),
        "maxProperties with optional": partial({"a": INTEGER, "b": INTEGER, "c": INTEGER}, maxProperties=2),
    },
    "the regex looks around or back": {
        "lookahead": string(pattern="^(?=.*[0-9])[a-z0-9]+$"),
        "negative lookahead": string(pattern="^(?!admin)[a-z]+$"),
        "lookbehind": string(pattern="(?<=a)b"),
        "backreference": string(pattern=r"^(a|b)\1$"),
        "word boundary": string(pattern=r"\bword\b"),
        "lookahead in patternProperties": opened(patternProperties={"^(?!x)": INTEGER}, additionalProperties=False),
    },
    "the regex is broken": {
        "unclosed class": string(pattern="^[a-z$"),
        "unclosed group": string(pattern="^(a$"),
        "nothing to repeat": string(pattern="^*a$"),
    },
    "the format is not known": {
        f"format {name}": string(format=name)
        for name in ("color", "phone", "regex", "idn-email", "iri", "json-pointer", "uri-template", "idn-hostname", "Date")
    },
    "the number is too large to be held exactly": {
        "const beyond 2^53": {"const": 2**53 + 1},
        "enum beyond 2^53": {"enum": [1, -(2**60) - 1]},
        "const beyond 2^53 in an object": record({"id": {"const": {"value": [2**53 + 1]}}}),
        "minimum beyond 64 bits": integer(minimum=10**20),
        "maximum beyond 64 bits": number(maximum=-1e20),
        "multipleOf of many states": integer(multipleOf=1_000_003),
        "multipleOf of many digits": number(multipleOf=0.123456789),
        "multiples whose product overflows": all_of(integer(multipleOf=2**16), integer(multipleOf=3 * (2**16 + 1))),
    },
    "the text can not be written": {
        "const of a control character": {"const": "\u0001"},
        "const of a control character in an object": record({"a": {"const": "\u0001"}}),
        "enum of control characters": {"enum": ["a", "\u001f"]},
        "enum of control characters in an array": array({"enum": ["\u0001", "\u007f"]}, minItems=1),
    },
    "no value fits": {
        "false": False,
        "required property false": record({"a": False}),
        "empty enum": {"enum": []},
        "lengths crossed": string(minLength=5, maxLength=2),
        "bounds crossed": integer(minimum=5, maximum=2),
        "bounds touch, exclusive": integer(minimum=5, exclusiveMaximum=5),
        "no integer between": integer(minimum=0.25, maximum=0.75),
        "items crossed": array(INTEGER, minItems=3, maxItems=2),
        "required but closed": record({"a": INTEGER}, required=["b"]),
        "const of another type": {"type": "string", "const": 1},
        "allOf of two types": all_of(STRING, INTEGER),
        "allOf of two consts": all_of({"const": 1}, {"const": 2}),
        "anyOf of nothing": any_of(False, False),
        "anyOf empty": {"anyOf": []},
        "multiple out of reach": integer(multipleOf=10, minimum=1, maximum=9),
        "prefix impossible but needed": array(prefixItems=[INTEGER, False], minItems=2),
        "pattern beyond the length": string(pattern="^a{5}$", maxLength=3),
        "two patterns apart": all_of(string(pattern="^a$"), string(pattern="^b$")),
    },
    "nothing can be built from a circle": {
        "reference to itself": {"$ref": "#"},
        "references in a circle": defined(ref("a"), a=ref("b"), b=ref("a")),
    },
    "the reference leads nowhere": {
        "missing definition": ref("missing"),
        "other document": {"$ref": "https://example.org/schema.json"},
        "other file": {"$ref": "types.json#/x"},
        "missing anchor": {"$ref": "#nowhere"},
        "name that is no URI": {"$ref": "#/$defs/größe", "$defs": {"größe": INTEGER}},
        "dynamic": {"$dynamicRef": "#node", "$defs": {"n": {"$dynamicAnchor": "node", "type": "integer"}}},
    },
    "it is not a JSON schema": {
        "type of nobody": {"type": "strin"},
        "type that is a number": {"type": 3},
        "negative length": string(minLength=-1),
        "length that is a text": string(minLength="3"),
        "properties that are a list": {"type": "object", "properties": ["a"]},
        "required that is a text": {"type": "object", "required": "a"},
        "enum that is a text": {"enum": "abc"},
        "minimum that is a text": integer(minimum="3"),
        "property that is a text": record({"a": "string"}),
        "anyOf that is an object": {"anyOf": {"type": "string"}},
        "pattern that is a list": string(pattern=["a"]),
        "exclusiveMinimum that is a boolean": integer(minimum=3, exclusiveMinimum=True),
        "multipleOf zero": integer(multipleOf=0),
        "root that is a list": [INTEGER],
        "root that is a text": "string",
    },
}


def _entries(group: str, schemas: dict[str, Schema]) -> list[Entry]:
    return [Entry(f"{group}: {name}", copy.deepcopy(schema)) for name, schema in schemas.items()]


def _endless() -> list[Entry]:
    return [Entry(f"endless: {name}", schema, is_endless=True) for name, schema in ENDLESS.items()]


def _refused() -> list[Entry]:
    return [
        Entry(f"refused: {name}", copy.deepcopy(schema), "refused", why)
        for why, schemas in REFUSED.items()
        for name, schema in schemas.items()
    ]


CORPUS: list[Entry] = [
    *_entries("type", TYPES),
    *_entries("literal", LITERALS),
    *_entries("length", LENGTHS),
    *_entries("pattern", {pattern or "(empty)": string(pattern=pattern) for pattern in PATTERNS}),
    *_entries("format", {name: string(format=name) for name in FORMATS}),
    *_entries(
        "format in a record",
        {name: record({"value": string(format=name), "next": nullable(string(format=name))}) for name in FORMATS},
    ),
    *_entries("number", NUMBERS),
    *_entries("array", ARRAYS),
    *_entries("object", OBJECTS),
    *_entries("combined", COMBINED),
    *_entries("reference", REFERENCES),
    *_entries("annotation", ANNOTATIONS),
    *_entries("realistic", REALISTIC),
    *_endless(),
    *_refused(),
]
