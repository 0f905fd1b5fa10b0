"""Which compiled grammars are kept, and for whom."""

from __future__ import annotations

import pytest

from driver import Clock
from weft.errors import GrammarRejected
from weft.grammar.grammar_cache import MAX_GRAMMARS, MAX_ONCE_USED, MAX_USES, ONCE_USED_SECONDS, GrammarCache, Owner
from weft.ipc.messages import GrammarSpec

ANNA, BEN = ("anna", ""), ("ben", "")
FOUND = GrammarRejected("as good as any other")


def spec(number: int) -> GrammarSpec:
    return GrammarSpec("regex", str(number))


def ask(cache: GrammarCache, owner: Owner, number: int) -> bool:
    """Ask as the compiler does; returns whether it had to compile."""
    if cache.take(owner, spec(number)) is not None:
        return False
    cache.keep(owner, spec(number), FOUND)
    return True


@pytest.mark.parametrize("other", [BEN, ("anna", "salt")], ids=["tenant", "salt"])
def test_a_grammar_is_kept_for_its_owner_alone(other: Owner) -> None:
    cache = GrammarCache()

    assert [ask(cache, owner, 1) for owner in (ANNA, ANNA, other, other)] == [True, False, True, False]


def test_grammars_that_nobody_asks_for_again_take_few_places() -> None:
    cache = GrammarCache()
    for number in range(1000):
        ask(cache, ANNA, number)

    assert len(cache) == MAX_ONCE_USED


def test_grammars_that_nobody_asks_for_again_are_dropped_after_some_seconds() -> None:
    clock = Clock()
    cache = GrammarCache(clock)
    for number in (1, 2, 2):
        ask(cache, ANNA, number)
    cache.drop_stale()
    kept_at_first = len(cache)
    clock.now += ONCE_USED_SECONDS + 1
    cache.drop_stale()

    assert (kept_at_first, len(cache)) == (2, 1)
    assert [ask(cache, ANNA, number) for number in (2, 1, 1)] == [False, True, False]


def test_they_displace_none_that_is_asked_for_again() -> None:
    cache = GrammarCache()
    ask(cache, BEN, 1)
    ask(cache, BEN, 1)
    for number in range(1000):
        ask(cache, ANNA, number)

    assert not ask(cache, BEN, 1)


def test_grammars_that_come_again_late_are_kept_from_then_on() -> None:
    cache, turns = GrammarCache(), range(4 * MAX_ONCE_USED)
    compiled = [sum(ask(cache, ANNA, number) for number in turns) for _ in range(3)]

    assert compiled[0] == len(turns)
    assert compiled[2] == 0


def test_an_owner_of_many_displaces_its_own() -> None:
    cache = GrammarCache()
    for number in range(10):
        ask(cache, BEN, number)
        ask(cache, BEN, number)
    for number in range(3 * MAX_GRAMMARS):
        ask(cache, ANNA, number)
        ask(cache, ANNA, number)

    assert len(cache) == MAX_GRAMMARS
    assert not any(ask(cache, BEN, number) for number in range(10))


def test_after_many_uses_a_grammar_is_compiled_anew() -> None:
    cache = GrammarCache()

    assert [ask(cache, ANNA, 1) for _ in range(MAX_USES + 2)].count(True) == 2
