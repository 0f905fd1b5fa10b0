"""What of a JSON Schema the engine can hold an answer to, and how it must be said.

The engine uses llguidance, which knows less than JSON Schema. Under strict, what it can not hold exactly is refused with
keyword and path: `not`, `if`, `contains`, `uniqueItems`, `propertyNames`, `dependent…`, `unevaluated…`, dynamic references;
`oneOf` with branches that are not evidently apart; formats it does not know; patterns with look-around, back-references, word
borders or nested classes; `minProperties` beyond what `required` gives plus one (keys may repeat), it and `maxProperties` beside
optional properties; a nested `$id`; control characters in constants and names; `contentEncoding` where the draft checks it.
Where llguidance is only loose the schema is narrowed: leap days and seconds, hosts, ECMA's white space, bounds that no float
holds, and under strict numbers that would overflow (they are written without exponent). Without strict it does what it can,
and the answer is checked afterwards.

Never taken: what is no JSON Schema, references out of the document (nothing is ever fetched), and numbers on which llguidance
1.9.1 errs, crashes or does not come back: constants beyond 2^53, bounds beyond 9.2e18, a `multipleOf` of many digits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations, islice
from typing import Any
from urllib.parse import unquote

import jsonschema_rs
import msgspec

MAX_DEPTH = 64
MAX_BRANCHES = 64  # of a oneOf: they are compared pair by pair
MAX_WORDS = 200
MAX_TEXT = 2**17  # bytes of a pattern, or of a whole grammar: four times as much compiles for two seconds

Node = dict[str, Any]
Problem = tuple[str, str]  # a place in the schema, as in .properties.x, and the keyword or what is wrong with it

UNENFORCED = frozenset(
    """
    not if then else contains minContains maxContains uniqueItems propertyNames dependencies dependentRequired dependentSchemas
    unevaluatedItems unevaluatedProperties $dynamicRef $dynamicAnchor $recursiveRef $recursiveAnchor
    """.split()  # noqa: SIM905 - a list literal would fill half a page
)
COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
BOUNDS = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}  # whether it is a lower one
EXACT, LARGEST, STEP = (
    2**53,
    92 * 10**17,
    4096,
)  # floats hold all integers up to the first, multiples of the last up to the second
APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
MAX_FACTOR = 10_000  # of a multipleOf without its twos and fives: each remainder is a state
MAX_FACTORS = 50_000  # of all of them together: 100 primes below 10,000 compile for six seconds
MAX_PATTERNED = 64  # patternProperties of one object: each is compared with each; 400 compile for six seconds
SKETCHED = {"type", "const", "enum", "required", *COUNTS, *BOUNDS}  # enough to tell branches apart, and cheap

ATOM, LETTER = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,15}", "[A-Za-z0-9]{1,15}"  # four of them are within what a part may have
HOST = rf"{LETTER}(-?{LETTER}){{0,3}}(\.{LETTER}(-?{LETTER}){{0,3}})*"
LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
DAYS = "(0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8])"
DATE = f"([0-9]{{4}}-({DAYS})|{LEAP_YEAR}-02-29)"
CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{CLOCK}:[0-5][0-9](\.[0-9]+)?([zZ]|[+-]{CLOCK})"
FORMATS: dict[str, Node] = {  # those llguidance knows; where it does so only nearly, what to say instead
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}$"},
    "date-time": {"pattern": f"^{DATE}[tT]{TIME}$"},
    "hostname": {"pattern": f"^{HOST}$", "maxLength": 253},
    "email": {"pattern": rf"^{ATOM}(\.?{ATOM}){{0,3}}@{HOST}$", "maxLength": 254},
    "duration": {},
    "ipv4": {},
    "ipv6": {},
    "uuid": {},
    "uri": {},
}
UNWRITABLE = re.compile("[\0-\x07\x0b\x0e-\x1f\x7f]")
WHITE = r" \f\n\r\t\v\u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"  # ECMA's, which is not quite Unicode's
REGEX_TOKEN = re.compile(
    r"\\(?:[dDwWsSnrtfv]|[pP]\{[^}]*\}|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^0-9A-Za-z])"
    r"|\((?!\?)|\(\?(?:[ims-]*:|P?<(?=[A-Za-z]))|[^\\(]",
    re.DOTALL,
)


@lru_cache(maxsize=32)
def examined(text: str, strict: bool) -> tuple[str, Problem | None]:
    """A schema as llguidance should get it, or what is wrong with it."""
    schema = _Schema(msgspec.json.decode(text))
    problem = schema.problem(text) or schema.miscalculated()
    if problem is None and strict and (found := schema.unenforceable()):
        path, keyword = found[0]
        problem = path, f"{keyword} can not be enforced; leave it out or set strict to false"
    return (schema.narrowed(strict), None) if problem is None else (text, problem)


@lru_cache(maxsize=32)
def validator(text: str) -> jsonschema_rs.Validator:
    """Checks values against a schema. Raises jsonschema_rs.ValidationError for what is none."""
    # Without `offline`, and always in jsonschema_rs.meta, what a schema names would be fetched.
    return jsonschema_rs.validator_for(msgspec.json.decode(text), validate_formats=True, offline=True)


def path_of(steps: list[str | int]) -> str:
    """A place as it is written: .properties.x.anyOf[0]."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


class _Schema:
    """A schema and its nodes: the root and what it holds or refers to, each with its place."""

    def __init__(self, document: Node) -> None:
        self.document = document
        levels = list(islice(_levels(document), MAX_DEPTH + 1))
        self.is_deep = len(levels) > MAX_DEPTH
        dicts = (value for level in levels for value in level if isinstance(value, dict))
        self._anchors = {f"#{node['$anchor']}": node for node in dicts if "$anchor" in node}
        self.nodes = list(self._reachable())

    def problem(self, text: str) -> Problem | None:
        """Why it is no schema that stands for itself."""
        if self.is_deep:
            return "", f"the schema is nested more than {MAX_DEPTH} levels deep"
        for path, node in self.nodes:
            reference = node.get("$ref")
            if isinstance(reference, str) and not reference.startswith("#"):
                return path, f"$ref {reference} leads out of the schema and is not fetched; put what it names under $defs"
        try:
            validator(text)
        except jsonschema_rs.ValidationError as error:
            return path_of(error.instance_path), f"not a valid JSON Schema: {error.message[:MAX_WORDS]}"
        return self._loop()

    def _loop(self) -> Problem | None:
        """A reference that leads back to itself, over nothing but references."""
        safe: set[int] = set()
        for path, node in self.nodes:
            trail: set[int] = set()
            at: Any = node
            while isinstance(at, dict) and "$ref" in at and id(at) not in safe:
                if id(at) in trail:
                    return path, f"$ref {node['$ref']} leads back to itself; no answer fits"
                trail.add(id(at))
                at = next((target for _, target in self._resolved(at["$ref"])), None)
            safe |= trail
        return None

    def miscalculated(self) -> Problem | None:
        """The first number that llguidance gets wrong, or that would be its end."""
        for path, node in self.nodes:
            for keyword in node.keys() & {"const", "enum"}:
                if any(isinstance(value, int | float) and abs(value) > EXACT for value in _values(node[keyword])):
                    return path, f"{keyword} has a number beyond 2^53, which can not be enforced"
            for keyword in node.keys() & BOUNDS.keys():
                if node[keyword] > LARGEST if BOUNDS[keyword] else node[keyword] < -LARGEST:
                    return path, f"{keyword} {node[keyword]} is too far out to be enforced"
            if isinstance(pattern := node.get("pattern"), str) and (size := len(pattern.encode())) > MAX_TEXT:
                return path, f"pattern has {size} bytes; at most {MAX_TEXT} are taken"
            if isinstance(patterns := node.get("patternProperties"), dict) and len(patterns) > MAX_PATTERNED:
                return path, f"patternProperties has {len(patterns)} patterns; at most {MAX_PATTERNED} are taken"
        return self._miscalculated_multiple()

    def _miscalculated_multiple(self) -> Problem | None:
        places = {node["multipleOf"]: path for path, node in self.nodes if "multipleOf" in node}
        for step, path in places.items():
            if not _is_feasible(_digits(step)[0]):
                return path, f"multipleOf {step} has too many digits to be enforced"
        if sum(_rest(_digits(step)[0]) for step in places) > MAX_FACTORS:
            return path, f"multipleOf {step} and others are together too many to be enforced"
        if len(places) > 1 and any(node.keys() & APPLICATORS for _, node in self.nodes):  # they may meet, and are multiplied then
            digits, shifts = zip(*map(_digits, places), strict=True)
            if not _is_feasible(math.prod(digits) * 10 ** max(shifts)):
                return path, f"multipleOf {step} and others together have too many digits to be enforced"
        return None

    def unenforceable(self) -> list[Problem]:
        """Places and keywords, from the root on."""
        return [(path, keyword) for path, node in self.nodes for keyword in self._unenforceable(node)]

    def narrowed(self, strict: bool) -> str:
        """Its text, after everything loose is said more tightly. The document is changed."""
        self.document.pop("x-guidance", None)  # llguidance's settings are ours
        for _, node in self.nodes:
            _narrow(node, strict)
        return msgspec.json.encode(self.document).decode()

    def _reachable(self) -> Iterator[tuple[str, Node]]:
        """Each node once. Properties' names and constants are no schemas; definitions count when they are used."""
        seen: set[int] = set()
        found: list[tuple[str, Any]] = [("", self.document)]
        for path, node in found:  # grows while it is walked
            if isinstance(node, dict) and id(node) not in seen:
                seen.add(id(node))
                yield path, node
                found += [(path + step, child) for step, child in _children(node)]
                found += self._resolved(node.get("$ref"))

    def _resolved(self, reference: Any) -> list[tuple[str, Any]]:
        """The schema that `#/…` or `#anchor` refers to, and its place; nothing where there is none."""
        if not isinstance(reference, str):
            return []
        if reference in self._anchors:
            return [(reference, self._anchors[reference])]
        path, node = "", self.document
        try:
            for step in unquote(reference).split("/")[1:]:
                name = step.replace("~1", "/").replace("~0", "~")
                node = node[int(name)] if isinstance(node, list) else node[name]
                path += f".{name}"
        except (LookupError, TypeError, ValueError):
            return []
        return [(path, node)]

    def _unenforceable(self, node: Node) -> Iterator[str]:
        yield from (keyword for keyword in node if keyword in UNENFORCED and (keyword != "uniqueItems" or node[keyword]))
        if node is not self.document and not str(node.get("$id", "#")).startswith("#"):  # below it "#/" means another place
            yield "$id"
        if "format" in node and _may_be("string", node) and node["format"] not in FORMATS:
            yield f"format {node['format']}"
        if "pattern" in node and _exact_regex(node["pattern"]) is None:
            yield "pattern"
        if any(_exact_regex(pattern) is None for pattern in node.get("patternProperties", ())):
            yield "patternProperties"
        if "oneOf" in node and not self._is_disjoint(node):
            yield "oneOf"
        for keyword in node.keys() & {"const", "enum", "properties"}:
            # Only a \u escape could write it, and the engine lets none through, lest a key hides in one.
            if any(map(UNWRITABLE.search, node[keyword] if keyword == "properties" else _texts(node[keyword]))):
                yield f"a control character in {keyword}"
        if re.search("draft-0[67]", self.document.get("$schema", "")):  # later drafts only describe with them
            yield from (keyword for keyword in ("contentEncoding", "contentMediaType") if keyword in node)
        yield from _miscounted(node)

    def _is_disjoint(self, node: Node) -> bool:
        """Whether surely no value fits two branches of a oneOf."""
        if len(node["oneOf"]) > MAX_BRANCHES:
            return False
        given = {"$schema": self.document.get("$schema"), "type": node.get("type")}
        given = {keyword: value for keyword, value in given.items() if value is not None}
        sketches = [self._sketch(branch) for branch in node["oneOf"]]
        sketches = [{**given, **sketch} if isinstance(sketch, dict) else sketch for sketch in sketches]
        shapes = [jsonschema_rs.canonicalize(sketch, offline=True) for sketch in sketches]
        never = jsonschema_rs.canonical.Satisfiability.NO
        return all(one.intersect(other).satisfiability() == never for one, other in combinations(shapes, 2))

    def _sketch(self, node: Any, inside: bool = False) -> Any:
        """A wider schema of a few cheap keywords: what fits a branch fits its sketch."""
        for _ in range(MAX_DEPTH):
            if not isinstance(node, dict) or "$ref" not in node:
                break
            node = next((target for _, target in self._resolved(node["$ref"])), True)
        if not isinstance(node, dict) or "$ref" in node:
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


def _miscounted(node: Node) -> Iterator[str]:
    """Counts of properties. Keys that are not listed may come twice; only one of them is sure to be new."""
    required, is_closed = set(node.get("required", ())), _is_closed(node)
    has_optional = bool(node.get("properties", {}).keys() - required)
    if node.get("minProperties", 0) > len(required) + (is_closed or not has_optional):
        yield "minProperties"
    if has_optional and "maxProperties" in node and not (is_closed and node["maxProperties"] == len(required) + 1):
        yield "maxProperties"


def _narrow(node: Node, strict: bool) -> None:
    """Say so that llguidance holds it exactly what it would hold only nearly."""
    for keyword in node.keys() & COUNTS:
        node[keyword] = int(node[keyword])  # llguidance does not take 2.0
    for keyword in node.keys() & BOUNDS.keys():
        if abs(node[keyword]) > EXACT:
            inner = int(min(max(node[keyword], -LARGEST), LARGEST)) // STEP
            node[keyword] = (inner + 2 if BOUNDS[keyword] else inner - 1) * STEP
    if not node.get("uniqueItems"):
        node.pop("uniqueItems", None)
    if not isinstance(node.get("items"), list):
        node.pop("additionalItems", None)  # it says nothing here, and llguidance would forget prefixItems over it
    more = [FORMATS[node.pop("format")]] if FORMATS.get(node.get("format", "")) else []
    more += _respell_patterns(node)
    if strict and "oneOf" in node:
        more.append({"anyOf": node.pop("oneOf")})
    if strict and "type" in node and _may_be("number", node):
        _keep_from_overflow(node)
    if more:
        node["allOf"] = [*node.get("allOf", ()), *more]


def _respell_patterns(node: Node) -> list[Node]:
    """Patterns in llguidance's dialect. Those it has no words for, and would refuse even without strict, are set aside."""
    aside: list[Node] = []
    if "pattern" in node and (exact := _exact_regex(node["pattern"])) is not None:
        node["pattern"] = exact
    elif "pattern" in node:
        aside.append({"pattern": node.pop("pattern")})
    names = {name: _exact_regex(name) for name in node.get("patternProperties", ())}
    if None not in names.values():
        node |= {"patternProperties": {names[name]: child for name, child in node["patternProperties"].items()}} if names else {}
    else:
        known = dict.fromkeys(node.get("properties", ()), True)
        rest: Node = {keyword: node.pop(keyword) for keyword in ("patternProperties", "additionalProperties") if keyword in node}
        aside.append({"properties": known, **rest})
    return [{"not": {"not": schema}} for schema in aside]  # it leaves out every `not`; the check of the answer does not


def _keep_from_overflow(node: Node) -> None:
    """Bounds keep exponents away, and the fractions of a multipleOf within a float's digits."""
    step = node.get("multipleOf", 1)
    far = LARGEST if step % 1 == 0 else min(LARGEST, step * 1e15)
    if not node.keys() & {"minimum", "exclusiveMinimum", "const", "enum"}:
        node["minimum"] = -far
    if far < LARGEST and not node.keys() & {"maximum", "exclusiveMaximum", "const", "enum"}:
        node["maximum"] = far


def _exact_regex(pattern: str) -> str | None:
    """A pattern that means to llguidance what this one means in ECMA's dialect; None where there is none."""
    written: list[str] = []
    in_class, end = False, 0
    for found in REGEX_TOKEN.finditer(pattern):
        token = found[0]
        is_empty = token == "]" and (written[-1:] == ["["] or written[-2:] == ["[", "^"])
        is_odd = in_class and (token == "[" or is_empty or (token in "&-~" and written[-1] == token))
        if found.start() != end or is_odd:
            return None
        end = found.end()
        in_class = token != "]" if in_class else token == "["
        if token == r"\s":
            token = WHITE if in_class else f"[{WHITE}]"
        elif token == r"\S" and not in_class:
            token = f"[^{WHITE}]"
        written.append(token)
    return "".join(written) if end == len(pattern) else None


def _digits(step: float) -> tuple[int, int]:
    """A multipleOf as llguidance counts: its digits, and how many of them stand behind the point."""
    digits, shift = float(abs(step)), 0
    while digits % 1 and digits < EXACT:
        digits, shift = digits * 10, shift + 1
    return int(digits), shift


def _is_feasible(factor: int) -> bool:
    return 0 < _rest(factor) <= MAX_FACTOR and factor < 2**32 / 10


def _rest(factor: int) -> int:
    """A factor without its twos and fives, which cost nothing in decimal."""
    while factor and factor % 10 in (0, 2, 4, 5, 6, 8):
        factor //= 2 if factor % 2 == 0 else 5
    return factor


def _values(value: Any) -> Iterator[Any]:
    return (item for level in _levels(value) for item in level)


def _texts(value: Any) -> Iterator[str]:
    """The strings and keys in a value."""
    for item in _values(value):
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            yield from item


def _may_be(kind: str, node: Node) -> bool:
    return kind in node.get("type", kind)


def _is_closed(node: Node) -> bool:
    return node.get("additionalProperties") is False and not node.get("patternProperties")


def _levels(value: Any) -> Iterator[list[Any]]:
    """A value, its children, their children …"""
    level = [value]
    while level:
        yield level
        parents = [parent for parent in level if isinstance(parent, dict | list)]
        level = [child for parent in parents for child in (parent.values() if isinstance(parent, dict) else parent)]
