"""Converts JSON Schemas, regexes, choices and grammars for an answer to `GrammarSpec`s, and validates answers by schema.

The engine enforces them with llguidance, which knows less than JSON Schema. Under strict, what it can not enforce exactly is
refused; without strict the answer is checked afterwards. Where it is too permissive, as with leap days, the schema is narrowed.
References out of the document, and numbers on which llguidance 1.9.1 errs, crashes or does not return, are always refused.
"""

import math
import re
from collections.abc import Iterator
from itertools import combinations, islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import msgspec

from weft.errors import InvalidRequest
from weft.ipc.messages import GrammarSpec
from weft.text.schema_closing import close_objects
from weft.text.schema_numbers import (
    BOUNDS,
    EXACT,
    decimal_of,
    infeasible_bounds,
    is_feasible,
    narrow_lists,
    narrow_numbers,
    without_twos_and_fives,
)
from weft.text.schema_patterns import UNWRITABLE, exact_regex, narrow_patterns, with_ascii_classes

MAX_BYTES = 2**19  # of a schema or a list of choices; programs send a tenth of it
MAX_TEXT = 2**17  # bytes of a pattern, or of a whole grammar: four times as much compiles for two seconds
MAX_ERRORS = 5
MAX_WORDS = 200  # characters of a validator's message
MAX_DEPTH = 64
MAX_BRANCHES = 64  # of a oneOf: they are compared pair by pair
MAX_FACTORS = 50_000  # of all of them together: 100 primes below 10,000 compile for six seconds
MAX_PATTERNED = 64  # patternProperties of one object: each is compared with each; 400 compile for six seconds

Node = dict[str, Any]
Problem = tuple[str, str]  # a place in the schema, as in .properties.x, and what is wrong there

UNENFORCED = {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
UNENFORCED |= {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
UNENFORCED |= {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"}
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
SKETCHED = {"type", "const", "enum", "required", *COUNTS, *BOUNDS}  # enough to tell branches apart, and cheap

ATOM, LETTER = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}", "[A-Za-z0-9]{1,15}"  # four of them are within what a part may have
HOST = rf"{LETTER}(-?{LETTER}){{0,3}}(\.{LETTER}(-?{LETTER}){{0,3}})*"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"([0-9]{{4}}-({DAYS})|{LEAP_YEAR}-02-29)"
CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{CLOCK})"
FORMATS: dict[str, Node] = {  # that llguidance knows; where it is loose, the schema to use instead
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}$"},
    "date-time": {"pattern": f"^{DATE}[tT]{TIME}$"},
    "hostname": {"pattern": f"^{HOST}$", "maxLength": 253},
    "email": {"pattern": rf"^{ATOM}(\.?{ATOM}){{0,3}}@{HOST}$", "maxLength": 254},
    **{name: {} for name in ("duration", "ipv4", "ipv6", "uuid", "uri")},
}
LARK_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|#[^\n]*|(?P<regex>/(?:\\.|[^/\\\n])+/)', re.DOTALL)


def json_schema_grammar(schema: Any, strict: bool, place: str, closes: bool | None = None) -> GrammarSpec:
    """Build the grammar of JSON answers that fit a schema, given as object or text. Raises InvalidRequest if unusable.

    `closes`: objects that name properties take no other keys unless they say so; None: without strict.
    """
    if isinstance(schema, str):
        schema = _parse(schema, place)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"{place} must be a JSON Schema: an object, or true", place)
    if schema is False:
        raise InvalidRequest(f"{place} is false, which no answer fits", place)
    enforced, problem = examine_schema(_encode({} if schema is True else schema, place), strict, closes)
    if problem is not None:
        raise InvalidRequest(f"{place}{problem[0]}: {problem[1]}", place + problem[0])
    return GrammarSpec("json_schema", enforced, lenient=not strict)


def regex_grammar(pattern: str, place: str) -> GrammarSpec:
    """Build the grammar of answers that match the pattern from end to end. Raises InvalidRequest if it is too long."""
    return GrammarSpec("regex", _bounded(with_ascii_classes(pattern), place, MAX_TEXT))


def choice_grammar(choices: list[str], place: str) -> GrammarSpec:
    """Build the grammar of answers that equal one of `choices`. Raises InvalidRequest for duplicates or excessive length."""
    if len(set(choices)) < len(choices):
        raise InvalidRequest(f"{place} has a text twice", place)
    for index, text in enumerate(choices):
        _bounded(text, f"{place}[{index}]", MAX_TEXT)
    return GrammarSpec("choice", _encode(choices, place))


def lark_grammar(text: str, place: str) -> GrammarSpec:
    """Make a GrammarSpec from a client's Lark or GBNF grammar. Raises InvalidRequest if it contains %json or is too long."""
    if "%json" in text:  # its schema would not be examined
        raise InvalidRequest(f"{place}: %json is not taken within a grammar; ask for a schema instead", place)
    narrowed = LARK_TOKEN.sub(lambda found: with_ascii_classes(found[0]) if found["regex"] else found[0], text)
    return GrammarSpec("lark", _bounded(narrowed, place, MAX_TEXT))


def structural_tag_grammar(tag: dict[str, Any] | str, place: str) -> GrammarSpec:
    """Build the grammar of free text in which certain tags are followed by JSON, whose schemas are enforced strictly."""
    value = _parse(tag, place) if isinstance(tag, str) else tag
    if not isinstance(value, dict):
        raise InvalidRequest(f"{place} must be an object", place)
    return GrammarSpec("structural_tag", _encode(_with_examined_schemas(value, place), place))


def find_schema_errors(spec: GrammarSpec, text: str) -> tuple[str, ...]:
    """Validate an answer against a non-strict schema; return up to five messages, or one if it is not JSON; () if valid."""
    try:
        answer = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        is_cut = "truncated" in str(error)
        return ("the answer was cut before it was complete" if is_cut else f"the answer is not valid JSON: {error}",)
    found = islice(_validator(spec.text).iter_errors(answer), MAX_ERRORS)
    return tuple(f"${_path(error.instance_path)}: {error.message[:MAX_WORDS]}" for error in found)


def examine_schema(text: str, strict: bool, closes: bool | None = None) -> tuple[str, Problem | None]:
    """Return the schema rewritten for llguidance and None, or the given schema and the first problem that makes it unusable."""
    schema = _Schema(msgspec.json.decode(text))
    if problem := next(schema.problems(text, strict), None):
        return text, problem
    schema.document.pop("x-guidance", None)  # llguidance's settings are ours
    if not strict if closes is None else closes:
        close_objects(schema.document, schema.resolve)
        schema = _Schema(schema.document)
    if not any("allOf" in unquote(str(node.get("$ref"))) for _, node in schema.nodes):  # into parts, which are rewritten
        for _, node in schema.nodes:
            narrow_lists(node)
    for _, node in schema.nodes:
        _narrow(node, strict)
    return msgspec.json.encode(schema.document).decode(), None


def levels_of(value: Any) -> list[list[Any]]:
    """Return the values in a JSON document by depth: [[root], children, grandchildren, …], at most MAX_DEPTH + 1 levels."""
    levels: list[list[Any]] = []
    level = [value]
    while level and len(levels) <= MAX_DEPTH:
        levels.append(level)
        parents = [parent for parent in level if isinstance(parent, dict | list)]
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
    return levels


def _values(value: Any) -> list[Any]:
    return [one for level in levels_of(value) for one in level]


def _validator(text: str) -> jsonschema_rs.Validator:
    # Without `offline`, and always in jsonschema_rs.meta, references would be fetched.
    return jsonschema_rs.validator_for(msgspec.json.decode(text), validate_formats=True, offline=True)


def _path(steps: list[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


class _Schema:
    """A JSON Schema and its nodes: the root and subschemas under enforceable keywords or $ref targets, with their paths."""

    def __init__(self, document: Node) -> None:
        self.document = document
        self._anchors = {f"#{one['$anchor']}": one for one in _values(document) if isinstance(one, dict) and "$anchor" in one}
        self.nodes = list(self._reachable())

    def problems(self, text: str, strict: bool) -> Iterator[Problem]:
        """Yield (path, message) per reason to refuse the schema. Take only the first: each check assumes earlier ones passed."""
        if len(levels_of(self.document)) > MAX_DEPTH:
            yield "", f"the schema is nested more than {MAX_DEPTH} levels deep"
        for path, node in self.nodes:
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                yield path, f"$ref {reference} leads out of the schema and is not fetched; put what it names under $defs"
        try:
            _validator(text)
        except jsonschema_rs.ValidationError as error:
            yield _path(error.instance_path), f"not a valid JSON Schema: {error.message[:MAX_WORDS]}"
        yield from self._reference_loops()
        yield from ((path, words) for path, node in self.nodes for words in _infeasible(node))
        yield from self._infeasible_multiples()
        advice = "can not be enforced; leave it out or set strict to false"
        for path, node in self.nodes if strict else ():
            yield from ((path, f"{keyword} {advice}") for keyword in self._unenforceable(node))

    def _reachable(self) -> Iterator[tuple[str, Node]]:
        """Yield (path, node) once per reachable subschema; constants are not schemas, and $defs count only if referenced."""
        seen: set[int] = set()
        found: list[tuple[str, Any]] = [("", self.document)]
        for path, node in found:  # grows while it is walked
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield path, node
                found += [(path + step, child) for step, child in _children(node)]
                found.append(self._resolve(node.get("$ref")))

    def _resolve(self, reference: Any) -> tuple[str, Any]:
        """Return path and schema of a local $ref; ("", None) if a `#/…` path leads nowhere; an unknown `#anchor` is the root."""
        if not isinstance(reference, str):
            return "", None
        if reference in self._anchors:
            return reference, self._anchors[reference]
        path, node = "", self.document
        try:
            for step in unquote(reference).split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                node = node[int(name)] if isinstance(node, list) else node[name]
                path += f".{name}"
        except (LookupError, TypeError, ValueError):
            return "", None
        return path, node

    def resolve(self, reference: Any) -> Any:
        """Return what a $ref names; None if it leads nowhere."""
        return self._resolve(reference)[1]

    def _reference_loops(self) -> Iterator[Problem]:
        safe: set[int] = set()
        for path, node in self.nodes:
            trail: set[int] = set()
            at: Any = node
            while isinstance(at, dict) and "$ref" in at and id(at) not in safe:
                if id(at) in trail:
                    yield path, f"$ref {node['$ref']} leads back to itself; no answer fits"
                    return
                trail.add(id(at))
                at = self._resolve(at["$ref"])[1]
            safe |= trail

    def _infeasible_multiples(self) -> Iterator[Problem]:
        places = {node["multipleOf"]: path for path, node in self.nodes if "multipleOf" in node}
        for step, path in places.items():
            if not is_feasible(decimal_of(step)[0]):
                yield path, f"multipleOf {step} has too many digits to be enforced"
        if sum(without_twos_and_fives(decimal_of(step)[0]) for step in places) > MAX_FACTORS:
            yield path, f"multipleOf {step} and others are together too many to be enforced"
        if len(places) > 1 and any(node.keys() & APPLICATORS for _, node in self.nodes):  # they may meet, and are multiplied then
            digits, shifts = zip(*map(decimal_of, places), strict=True)
            if not is_feasible(math.prod(digits) * 10 ** max(shifts)):
                yield path, f"multipleOf {step} and others together have too many digits to be enforced"

    def _unenforceable(self, node: Node) -> Iterator[str]:
        yield from (keyword for keyword in node if keyword in UNENFORCED and (keyword != "uniqueItems" or node[keyword]))
        if node is not self.document and not str(node.get("$id", "#")).startswith("#"):  # below it "#/" means another place
            yield "$id"
        if "format" in node and "string" in node.get("type", "string") and node["format"] not in FORMATS:
            yield f"format {node['format']}"
        if "pattern" in node and exact_regex(node["pattern"]) is None:
            yield "pattern"
        if any(exact_regex(pattern) is None for pattern in node.get("patternProperties", ())):
            yield "patternProperties"
        if "oneOf" in node and not self._is_disjoint(node):
            yield "oneOf"
        for keyword in node.keys() & {"const", "enum", "properties"}:
            values = [node[keyword]] if keyword == "properties" else _values(node[keyword])
            texts = ["".join(one) for one in values if isinstance(one, str | dict)]  # strings, and the keys of objects
            if UNWRITABLE.search("".join(texts)):
                yield f"a control character in {keyword}"
        if re.search("draft-0[67]", self.document.get("$schema", "")):  # in later drafts they only describe
            yield from (keyword for keyword in ("contentEncoding", "contentMediaType") if keyword in node)
        # Counts of properties: keys that are not listed may come twice, and only one of them is sure to be new.
        required, is_closed = set(node.get("required", ())), _is_closed(node)
        has_optional = bool(node.get("properties", {}).keys() - required)
        if node.get("minProperties", 0) > len(required) + (is_closed or not has_optional):
            yield "minProperties"
        if has_optional and "maxProperties" in node and not (is_closed and node["maxProperties"] == len(required) + 1):
            yield "maxProperties"

    def _is_disjoint(self, node: Node) -> bool:
        """Whether provably no value fits two branches of the node's oneOf; False if unproven or beyond MAX_BRANCHES."""
        if len(node["oneOf"]) > MAX_BRANCHES:
            return False
        shared = {keyword: place[keyword] for place, keyword in ((self.document, "$schema"), (node, "type")) if keyword in place}
        sketches = [shared | sketch if isinstance(sketch, dict) else sketch for sketch in map(self._sketch, node["oneOf"])]
        shapes = [jsonschema_rs.canonicalize(sketch, offline=True) for sketch in sketches]
        never = jsonschema_rs.canonical.Satisfiability.NO
        return all(one.intersect(other).satisfiability() == never for one, other in combinations(shapes, 2))

    def _sketch(self, node: Any, inside: bool = False) -> Any:
        """Return a cheap, wider approximation of a schema: every value that fits the schema also fits the sketch."""
        while isinstance(node, dict) and "$ref" in node:  # ends: loops were refused before
            node = self._resolve(node["$ref"])[1]
        if not isinstance(node, dict):
            return node is not False
        sketch = {keyword: value for keyword, value in node.items() if keyword in SKETCHED}
        properties = {} if inside else node.get("properties", {})
        is_closed = not inside and _is_closed(node) and len(properties) <= MAX_BRANCHES
        names = properties if is_closed else [name for name in node.get("required", ())[:MAX_BRANCHES] if name in properties]
        sketch["properties"] = {name: self._sketch(properties[name], inside=True) for name in names}
        return sketch | ({"additionalProperties": False} if is_closed else {})


def _children(node: Node) -> Iterator[tuple[str, Any]]:
    for keyword, value in node.items():
        match keyword, value:
            case "properties" | "patternProperties", dict():
                yield from ((f".{keyword}.{name}", child) for name, child in value.items())
            case "allOf" | "anyOf" | "oneOf" | "prefixItems" | "items", list():
                yield from ((f".{keyword}[{index}]", child) for index, child in enumerate(value))
            case "items" | "additionalItems" | "additionalProperties", dict():
                yield f".{keyword}", value


def _infeasible(node: Node) -> Iterator[str]:
    """Yield messages for values in a schema node that llguidance handles wrongly or compiles for seconds."""
    for keyword in node.keys() & {"const", "enum"}:
        if any(isinstance(value, int | float) and abs(value) > EXACT for value in _values(node[keyword])):
            yield f"{keyword} has a number beyond 2^53, which can not be enforced"
    yield from infeasible_bounds(node)
    if isinstance(pattern := node.get("pattern"), str) and (size := len(pattern.encode())) > MAX_TEXT:
        yield f"pattern has {size} bytes; at most {MAX_TEXT} are taken"
    if isinstance(patterns := node.get("patternProperties"), dict) and len(patterns) > MAX_PATTERNED:
        yield f"patternProperties has {len(patterns)} patterns; at most {MAX_PATTERNED} are taken"


def _narrow(node: Node, strict: bool) -> None:
    """Rewrite in place keywords that llguidance misreads or enforces loosely; the result may be narrower, never wider."""
    for keyword in node.keys() & COUNTS:
        node[keyword] = int(node[keyword])  # llguidance does not take 2.0
    narrow_numbers(node, strict)
    if not node.get("uniqueItems"):
        node.pop("uniqueItems", None)
    if not isinstance(node.get("items"), list):
        node.pop("additionalItems", None)  # it means nothing here, and llguidance would forget prefixItems over it
    more = [FORMATS[node.pop("format")]] if FORMATS.get(node.get("format", "")) else []
    more += narrow_patterns(node)
    if strict and "oneOf" in node:
        more.append({"anyOf": node.pop("oneOf")})
    if more:
        node["allOf"] = [*node.get("allOf", ()), *more]


def _is_closed(node: Node) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _with_examined_schemas(value: Any, place: str, key: str = "") -> Any:
    """Return part of a structural tag in which each schema is replaced by one checked and rewritten for llguidance."""
    if key in ("schema", "json_schema"):
        return msgspec.Raw(json_schema_grammar(value, True, place).text)
    if isinstance(value, list):
        return [_with_examined_schemas(item, f"{place}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _with_examined_schemas(item, f"{place}.{name}", name) for name, item in value.items()}
    return value


def _parse(text: str, place: str) -> Any:
    try:
        return msgspec.json.decode(_bounded(text, place))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"{place} is not valid JSON: {error}", place) from None


def _encode(value: Any, place: str) -> str:
    return _bounded(msgspec.json.encode(value).decode(), place)


def _bounded(text: str, place: str, max_bytes: int = MAX_BYTES) -> str:
    if (size := len(text.encode())) > max_bytes:
        raise InvalidRequest(f"{place} has {size} bytes; at most {max_bytes} are taken", place)
    return text
