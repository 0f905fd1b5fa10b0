"""Narrows the numeric keywords of a JSON Schema to what llguidance 1.9.1 enforces exactly; finds those that it can not."""

from collections.abc import Callable, Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from operator import ge, gt, le, lt
from typing import Any

Node = dict[str, Any]

BOUNDS = {"minimum": True, "exclusiveMinimum": True, "maximum": False, "exclusiveMaximum": False}  # whether it is a lower one
HOLDS: dict[str, Callable[[Fraction, Fraction], bool]] = {
    "minimum": ge,
    "exclusiveMinimum": gt,
    "maximum": le,
    "exclusiveMaximum": lt,
    "multipleOf": lambda value, step: (value / step).denominator == 1,
}
EXACT = 2**53  # floats hold all integers up to here
LARGEST, STEP = 92 * 10**17, 4096  # floats hold all multiples of STEP up to LARGEST
DIGITS = 15  # of a number that any reader of JSON reads exactly
UPWARD, DOWNWARD = Context(prec=DIGITS, rounding=ROUND_CEILING), Context(prec=DIGITS, rounding=ROUND_FLOOR)
SMALLEST = Decimal("1e-60")  # of a number that must not be 0: as a float it is none, and llguidance can have a rule for it
LEAST = Decimal("1e-300")  # the same where another bound is nearer to 0 than SMALLEST: only weft's own rules go so far
MAX_FACTOR = 10_000  # of a multipleOf without its twos and fives: each remainder is a state


def infeasible_bounds(node: Node) -> Iterator[str]:
    """Yield a message for each bound that llguidance can not represent."""
    for keyword in node.keys() & BOUNDS.keys():
        if node[keyword] > LARGEST if BOUNDS[keyword] else node[keyword] < -LARGEST:
            yield f"{keyword} {node[keyword]} is too far out to be enforced"


def narrow_numbers(node: Node, strict: bool) -> None:
    """Rewrite a node's bounds in place, so that no number beyond them gets through, neither as a decimal nor as a float."""
    for keyword in node.keys() & BOUNDS.keys():
        if abs(node[keyword]) > EXACT:
            inner = int(min(max(node[keyword], -LARGEST), LARGEST)) // STEP
            node[keyword] = (inner + 2 if BOUNDS[keyword] else inner - 1) * STEP
    if node.get("type") != "integer":
        for keyword in node.keys() & BOUNDS.keys():
            _make_inclusive(node, keyword)
    if strict and "number" in node.get("type", "number") and (step := node.get("multipleOf", 1)) % 1:
        far = 10.0 ** (DIGITS - decimal_of(step)[1])
        node["minimum"] = max(node.get("minimum", -far), -far)
        node["maximum"] = min(node.get("maximum", far), far)


def narrow_lists(node: Node) -> None:
    """Take the numbers out of a node's enum or const that its bounds and multipleOf exclude, and then these keywords.

    llguidance compares as floats, for which 19.9 is no multiple of 0.01. What would leave nothing stays, to be refused.
    """
    inner = (part for part in node.get("allOf", ()) if isinstance(part, dict))
    parts = [part for part in (node, *inner) if not part.keys() & {"$ref", "$anchor", "$dynamicAnchor", "$id"}]
    rules = [(keyword, part[keyword]) for part in parts for keyword in part if keyword in HOLDS]
    listing = [part for part in parts if part.keys() & {"enum", "const"}]
    if not (rules and listing) or any(isinstance(limit, bool) for _, limit in rules):
        return
    lists = [[part["const"]] if "const" in part else part["enum"] for part in listing]
    kept = [[value for value in values if _fits(value, rules)] for values in lists]
    if all(kept):
        for part in parts:
            for keyword in part.keys() & HOLDS.keys():
                del part[keyword]
        for part, values in zip(listing, kept, strict=True):
            part |= {} if "const" in part else {"enum": values}


def _fits(value: Any, rules: list[tuple[str, Any]]) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return True
    return all(HOLDS[keyword](Fraction(repr(value)), Fraction(repr(limit))) for keyword, limit in rules)


def _make_inclusive(node: Node, keyword: str) -> None:
    """Replace a bound by the nearest number of DIGITS digits within it, which is the bound itself if it is inclusive and short.

    llguidance takes an exclusive bound itself where the other one is close, and reads longer numbers inexactly.
    """
    bound, is_lower, is_exclusive = node[keyword], BOUNDS[keyword], keyword.startswith("exclusive")
    if isinstance(bound, bool) or (not is_exclusive and isinstance(bound, int)):
        return
    del node[keyword]
    inclusive = "minimum" if is_lower else "maximum"
    exact = _beside_zero(node, is_lower) if is_exclusive and not bound else _inside(Decimal(repr(bound)), is_lower, is_exclusive)
    inside = int(exact) if exact % 1 == 0 else float(exact)
    node[inclusive] = (max if is_lower else min)(node.get(inclusive, inside), inside)


def _beside_zero(node: Node, is_lower: bool) -> Decimal:
    """Return the bound of the numbers above 0, or of those below it."""
    others = (abs(Decimal(repr(node[keyword]))) for keyword in node.keys() & BOUNDS.keys() if BOUNDS[keyword] != is_lower)
    least = SMALLEST if min(others, default=SMALLEST * 10) > SMALLEST else LEAST
    return least if is_lower else -least


def _inside(bound: Decimal, is_lower: bool, is_exclusive: bool) -> Decimal:
    context = UPWARD if is_lower else DOWNWARD
    if not is_exclusive:
        return context.plus(bound)
    if abs(bound) >= 10**DIGITS:  # beyond it a float has no fraction to speak of
        return context.to_integral_value(bound) + (1 if is_lower else -1) if bound % 1 == 0 else context.to_integral_value(bound)
    return bound.next_plus(UPWARD) if is_lower else bound.next_minus(DOWNWARD)


def decimal_of(step: float) -> tuple[int, int]:
    """Return a multipleOf as llguidance represents it: an integer of all its digits, and its number of decimal places."""
    digits, shift = float(abs(step)), 0
    while digits % 1 and digits < EXACT:
        digits, shift = digits * 10, shift + 1
    return int(digits), shift


def is_feasible(factor: int) -> bool:
    """Whether a multipleOf with these digits is compiled in bounded time."""
    return 0 < without_twos_and_fives(factor) <= MAX_FACTOR and factor < 2**32 / 10


def without_twos_and_fives(factor: int) -> int:
    """Divide the factor by 2 and by 5 as often as it goes."""
    while factor and (factor % 2 == 0 or factor % 5 == 0):  # they cost nothing in decimal
        factor //= 2 if factor % 2 == 0 else 5
    return factor
