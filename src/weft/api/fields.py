"""What a request's fields do, at every level of its body: it acts, is refused, is harmless, or is reported."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weft.errors import InvalidRequest, UnsupportedParameter
from weft.text.bodies import Body, Shape, convert, shape_of

BUDGET = "thinking_token_budget"
BUDGET_NAMES: tuple[str, ...] = (BUDGET, "thinking_budget", "reasoning_budget", "reasoning_budget_tokens")
BUDGET_NAMES += ("max_thinking_tokens", "thinking_budget_tokens", "thinking_tokens")
BUDGET_PLACES = (*BUDGET_NAMES, *(f"{outer}.{name}" for outer in ("chat_template_kwargs", "options") for name in BUDGET_NAMES))
BUDGET_PLACES += ("thinking.budget_tokens", "reasoning.max_tokens")
BUDGET_HOLDERS = frozenset(outer for outer, dot, _ in (place.rpartition(".") for place in BUDGET_PLACES) if dot)

# Words of a top-level name that speak of a constraint: an answer that ignores it would be wrong without a word.
CONSTRAINING = frozenset("budget schema grammar guided regex choice format stop max min".split())  # noqa: SIM905 - words


@dataclass(frozen=True)
class Fate:
    """What becomes of a known field that does not act: refused unless its value is idle, or, without `idle`, harmless."""

    why: str  # a clause for the error message and the documentation
    idle: tuple[Any, ...] | None = None  # values that would change nothing; null always is one
    is_reported: bool = False  # listed in a header of the reply, as fields are that nobody knows

    def accepts(self, value: Any) -> bool:
        # JSON's true is not 1, though Python's is.
        return self.idle is None or any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.idle)


def refused(why: str, *idle: Any) -> Fate:
    """The fate of a field that would change the answer, or what is told of it, if its value is not one of `idle`."""
    return Fate(why, idle)


def harmless(why: str) -> Fate:
    """The fate of a field that changes no answer."""
    return Fate(why)


def reported(why: str) -> Fate:
    """The fate of a field that clients send with every request and that would act: accepted, and listed as ignored."""
    return Fate(why, is_reported=True)


def is_constraint(name: str) -> bool:
    """Whether a top-level name has a word that speaks of a constraint."""
    words = re.split("[^a-z]+", re.sub("([A-Z])", r"_\1", name).lower())
    return name.isidentifier() and not CONSTRAINING.isdisjoint(word.removesuffix("s") for word in words)


Fates = Mapping[str, Fate]  # by path: `tools[].strict` is the field strict of each entry of the list tools


@dataclass(frozen=True)
class FieldRules:
    """Rules of one dialect for fields that its structs do not read: refused, harmless, or (in no table) reported as unknown."""

    fates: Fates
    wrappers: tuple[str, ...] = ()  # objects whose fields count as fields of the body
    aliases: Mapping[str, str] = field(default_factory=dict)  # other servers' names of fields that act

    @property
    def refused(self) -> dict[str, tuple[Any, ...]]:
        """The refused fields of the top level, each with the values that are accepted because they change nothing."""
        return {name: fate.idle for name, fate in self.fates.items() if fate.idle is not None and name.isidentifier()}

    @property
    def harmless(self) -> frozenset[str]:
        return frozenset(name for name, fate in self.fates.items() if fate.idle is None and name.isidentifier())

    def find_unknown(self, body: dict[str, Any], kind: type[msgspec.Struct]) -> tuple[str, ...]:
        """Return the paths of the fields that nobody knows, `[]` for any index. Raises UnsupportedParameter."""
        shape = shape_of(kind)
        found: dict[str, None] = {}
        for path, pattern, value in self._opened(shape.unknown(body, "", "")):
            fate = self.fates.get(pattern)
            if pattern in BUDGET_PLACES and BUDGET in (shape.fields or {}):  # it has been read
                continue
            if fate is None:
                self._check_word(path, shape)
            if fate is None or fate.is_reported:
                found[pattern] = None
            elif not fate.accepts(value):
                values = "".join(f" or set it to {msgspec.json.encode(one).decode()}" for one in fate.idle or ())
                raise UnsupportedParameter(f"{path} is not supported here: {fate.why}; leave it out{values}", path)
        return tuple(sorted(found))

    def _opened(self, unknown: Iterator[tuple[str, str, Any]]) -> Iterator[tuple[str, str, Any]]:
        """Yield the fields of an unknown object that may hold a reasoning budget in its place: the others may act elsewhere."""
        for path, pattern, value in unknown:
            if isinstance(value, dict) and pattern in BUDGET_HOLDERS - self.fates.keys():
                yield from Shape.of().unknown(value, path, pattern)
            else:
                yield path, pattern, value

    def read(self, body: dict[str, Any], kind: type[Body]) -> tuple[Body, tuple[str, ...]]:
        """Validate a body; return its struct and the paths of the fields nobody knows. Raises InvalidRequest."""
        for wrapper in self.wrappers:
            body = _unwrapped(body, wrapper)
        if BUDGET in kind.__struct_fields__:
            body = _with_one_budget(body)
        body = self._by_own_names(body)
        unknown = self.find_unknown(body, kind)
        return convert(body, kind), unknown

    def place_of_budget(self, body: dict[str, Any]) -> str:
        """Return the path at which a body has its reasoning budget, for errors."""
        places = (f"{outer}.{place}".lstrip(".") for outer in ("", *self.wrappers) for place in BUDGET_PLACES)
        return next((place for place in places if _value_at(body, place) is not None), BUDGET)

    def _by_own_names(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return a body in which aliases are replaced by the names they stand for. Raises InvalidRequest if two differ."""
        for alias in self.aliases.keys() & body.keys():
            name, value = self.aliases[alias], body[alias]
            body = {other: given for other, given in body.items() if other != alias}
            if value is not None and body.setdefault(name, value) not in (None, value):
                raise InvalidRequest(f"{alias} and {name} mean the same and differ; send one of them", alias)
            if value is not None:
                body[name] = value
        return body

    @staticmethod
    def _check_word(name: str, shape: Shape) -> None:
        """Refuse an unknown top-level field whose name speaks of a constraint, with the nearest name that acts."""
        if is_constraint(name):
            near = difflib.get_close_matches(name, [*(shape.fields or ())], 1, 0)[0]
            message = f"{name} is not known here, and without it the answer could be wrong; the nearest known name is {near}"
            raise UnsupportedParameter(message, name)


def _value_at(body: dict[str, Any], place: str) -> Any:
    value: Any = body
    for name in place.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _unwrapped(body: dict[str, Any], wrapper: str) -> dict[str, Any]:
    """Return a body with the fields of its object `wrapper` beside its own; two that differ and are not null are refused."""
    inner = body.get(wrapper)
    if not isinstance(inner, dict):
        return body
    for name in inner.keys() & body.keys():
        if inner[name] != body[name] and None not in (inner[name], body[name]):
            raise InvalidRequest(f"{wrapper}.{name} and {name} differ; send one of them", f"{wrapper}.{name}")
    own = {name: value for name, value in body.items() if name != wrapper and not (value is None and name in inner)}
    return {**inner, **own}


def _with_one_budget(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body whose reasoning budget, by whatever names it is given, is in `thinking_token_budget`; -1 is no limit."""
    given: dict[str, int] = {}
    for place in BUDGET_PLACES:
        outer, _, name = place.rpartition(".")
        holder = body if not outer or place in body else body.get(outer)
        value = holder.get(place if holder is body else name) if isinstance(holder, dict) else None
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < -1:
            raise InvalidRequest(f"{place} must be a number of tokens, or -1 for no limit", place)
        given[place] = value
    first, budget = next(iter(given.items()), (BUDGET, -1))
    if other := next((place for place in given if given[place] != budget), None):
        raise InvalidRequest(f"{first} and {other} mean the same and differ; send one of them", other)
    rest = {name: value for name, value in body.items() if name not in BUDGET_PLACES}
    return rest if budget < 0 else {**rest, BUDGET: budget}
