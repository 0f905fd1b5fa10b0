"""Regexes of the JSON numbers between two bounds: plain decimals, and decimals with an exponent, which llguidance lacks there.

Every text that a rule takes is within the bounds as the decimal that it is and as the float that clients read. Bounds are
inclusive; where a number must not be 0 the front writes a bound next to it. Numbers below PLAINEST have an exponent.
"""

from decimal import Decimal
from itertools import groupby

FARTHEST = 300  # the exponent of a number with one digit before the point: a float reaches further
NEAREST = Decimal(1).scaleb(-FARTHEST)  # to 0
MAX_WHOLE = 8  # digits before the point of a number with an exponent: with more of them 1e300 were infinite
ZEROS = 19  # behind the point of a plain number without bounds
PLAINEST = Decimal(1).scaleb(-ZEROS - 1)
DIGITS, FRACTION = "[0-9]*", r"(\.[0-9]+)?"
MANTISSA = r"[1-9](\.[0-9]{1,17})?"  # as many digits as floats have: where an exponent must come, it is not put off for ever
# The forms of a number above 0 without further bounds: alone, and before an exponent. Clients read all of them as finite floats.
ANY_POSITIVE, BEFORE_EXPONENT = (
    rf"([1-9][0-9]{{0,{more}}}{FRACTION}|0\.0{{0,{ZEROS}}}[1-9]{DIGITS})" for more in (FARTHEST - 1, MAX_WHOLE - 1)
)

Terminal = str  # a Lark expression of regexes


def number_terminal(low: Decimal | None, high: Decimal | None) -> Terminal | None:
    """Return a Lark terminal for the numbers from `low` to `high` (None: no bound); None if there is no number."""
    parts = []
    if high is None or high > 0:
        parts += _positive("", max(low or Decimal(0), Decimal(0)), high)
    if low is None or low < 0:
        parts += _positive("-", max(-high if high else Decimal(0), Decimal(0)), None if low is None else -low)
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append(r"/-?0(\.0+)?([eE][+-]?[0-9]{1,3})?/")
    return " | ".join(parts) or None


def _positive(sign: str, low: Decimal, high: Decimal | None) -> list[Terminal]:
    """Return terminals for the numbers above 0 from `low` to `high`, with a sign before them."""
    low = max(low, NEAREST) if low else low
    if high is not None and low > high:
        return []
    first = _least_exponent(low)
    if high is None and low <= PLAINEST and low in (0, Decimal(1).scaleb(first)):
        whole = f"/{sign}[1-9][0-9]{{0,{MAX_WHOLE - 1}}}{FRACTION}{_exponent(first, FARTHEST)}/"
        return [f"/{sign}{ANY_POSITIVE}/", f"/{sign}{BEFORE_EXPONENT}{_exponent(first + ZEROS + 1, FARTHEST)}/", whole]
    least = low if low > PLAINEST else Decimal(0)
    plain = [] if high is not None and high < PLAINEST else _between(sign, ANY_POSITIVE, least, high, "")
    return [*plain, *_scientific(sign, low, high)]


def _scientific(sign: str, low: Decimal, high: Decimal | None) -> list[Terminal]:
    """Return terminals for numbers with one digit before the point and an exponent, between the bounds."""
    first = _least_exponent(low)
    last = FARTHEST if high is None else min(high.adjusted(), FARTHEST)
    least = low.scaleb(-first)
    most = None if high is None else high.scaleb(-last)
    if first > last:  # nothing but what is written plainly
        return []
    if first == last:
        return _between(sign, MANTISSA, least, most, _exponent(first, last))
    found = _between(sign, MANTISSA, least, None, _exponent(first, first))
    found += [f"/{sign}{MANTISSA}{_exponent(first + 1, last - 1)}/"] if last - first > 1 else []
    return found + (_between(sign, MANTISSA, Decimal(0), most, _exponent(last, last)) if first < last else [])


def _least_exponent(low: Decimal) -> int:
    return low.adjusted() if low else -FARTHEST


def _between(sign: str, form: str, low: Decimal, high: Decimal | None, behind: str) -> list[Terminal]:
    """Return a terminal for the decimals of a form between the bounds, with a sign before and an exponent behind them."""
    texts = [form, *([_at_least(low)] if low else []), *([] if high is None else [_at_most(high)])]
    return ["(" + " & ".join(f"/{sign}{text}{behind}/" for text in texts) + ")"]


def _at_least(bound: Decimal) -> str:
    """Return a regex of the plain decimals from `bound` on; it is above 0."""
    whole, fraction = _digits(bound)
    ways = [rf"[1-9][0-9]{{{len(whole)},}}{FRACTION}"]
    ways += [
        f"{whole[:at]}{_above(digit)}[0-9]{{{len(whole) - at - 1}}}{FRACTION}" for at, digit in enumerate(whole) if digit < "9"
    ]
    ways += [rf"{whole}\.{fraction[:at]}{_above(digit)}{DIGITS}" for at, digit in enumerate(fraction) if digit < "9"]
    ways.append(rf"{whole}\.{fraction}{DIGITS}" if fraction else whole + FRACTION)
    return f"({'|'.join(ways)})"


def _at_most(bound: Decimal) -> str:
    """Return a regex of the plain decimals up to `bound`, not below 0."""
    whole, fraction = _digits(bound)
    ways = [rf"(0|[1-9][0-9]{{0,{len(whole) - 2}}}){FRACTION}"] if len(whole) > 1 else []
    for at, digit in enumerate(whole):
        least = "1" if at == 0 and len(whole) > 1 else "0"
        if digit > least:
            ways.append(f"{whole[:at]}[{least}-{int(digit) - 1}][0-9]{{{len(whole) - at - 1}}}{FRACTION}")
    for at, digit in enumerate(fraction):
        ways += [rf"{whole}\.{fraction[:at]}[0-{int(digit) - 1}]{DIGITS}"] if digit > "0" else []
        ways += [rf"{whole}\.{fraction[:at]}"] if at else []
    ways.append(rf"{whole}(\.{fraction}0*)?" if fraction else rf"{whole}(\.0+)?")
    return f"({'|'.join(ways)})"


def _above(digit: str) -> str:
    return f"[{int(digit) + 1}-9]"


def _digits(bound: Decimal) -> tuple[str, str]:
    """Return the digits before and behind the point."""
    whole, _, fraction = f"{bound:f}".partition(".")
    return whole, fraction.rstrip("0")


def _exponent(first: int, last: int) -> str:
    """Return a regex of the exponents from `first` to `last`, with their e."""
    signs = [(r"\+?", max(first, 0), last), ("-", max(-last, 1), -first)]
    return f"[eE]({'|'.join(f'{sign}0{{0,2}}{_integers(low, high)}' for sign, low, high in signs if low <= high)})"


def _integers(first: int, last: int) -> str:
    tens = [(ten, [*group]) for ten, group in groupby(range(first, last + 1), lambda number: number // 10)]
    ways = (f"{ten or ''}[{group[0] % 10}-{group[-1] % 10}]" for ten, group in tens)
    return f"({'|'.join(ways)})"
