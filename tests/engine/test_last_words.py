"""Chat prompts that are alike but for their last words: where the second of two goes on, at every length, in every family.

A *hit* goes on from the last of the prompt's own chunk ends before the words that differ: one to two times TAIL_TOKENS before
its end, or where its system message ends. So at most 35 of the tokens it has in common with an earlier one are computed again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts
from thoroughness import ALL
from weft.engine.scheduler import TAIL_TOKENS, tail_end
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import Submit
from weft.memory.prefix_tree import Node
from weft.model.adapter import Adapter
from zoo import ARCHITECTURES, PROMISED, VOCABULARY

LENGTHS = range(20, 201)
CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30, chunk_tokens=128, group_tokens=512, unsliced_tokens=512, max_rows=16)
WORD = 3  # tokens of the last word, of which the first differs
CLOSING = 2  # tokens that end the user's turn
OPENINGS = {"thinking": 5, "not thinking": 7}  # tokens with which the answer's turn opens
TEXT, TURN_ENDS = random_prompts(VOCABULARY, (200, CLOSING + 7), seed=5)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A chat prompt of `length` tokens whose last word begins with the token `word`."""

    length: int
    word: int
    opening: int = 7
    system: int = 0  # tokens of its system message

    @property
    def common(self) -> int:
        """How many tokens it has in common with one of another word."""
        return self.length - self.opening - CLOSING - WORD

    def submit(self, run: Run, *, salt: str = "", tokens: int = 1) -> Sequence:
        sampling = (Sampling(temperature=0.0, max_tokens=tokens, ignore_eos=True),)
        boundaries = tuple(place for place in (self.system, self.length - self.opening) if place)
        (row,) = run.engine.submit_all(Submit((0,), self.prompt, sampling, boundaries=boundaries, salt=salt))
        return row

    @property
    def prompt(self) -> list[int]:
        return [*TEXT[: self.common], self.word, *[7] * (WORD - 1), *TURN_ENDS[: CLOSING + self.opening]]


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def seconds(run: Run, asked: Iterable[Asked]) -> list[Sequence]:
    """Submit each of these prompts under a salt of its own; then each with another last word, and return those rows."""
    pairs = [(one, str(one)) for one in asked]
    for one, salt in pairs:
        one.submit(run, salt=salt)
    run.finish()
    rows = [dataclasses.replace(one, word=one.word + 1).submit(run, salt=salt) for one, salt in pairs]
    run.finish()
    return rows


def cached(rows: Iterable[Sequence]) -> list[int]:
    return [row.timings.cached_tokens for row in rows]


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
@pytest.mark.parametrize("name", ["qwen3_5", "gemma3_text"])
def test_of_two_prompts_of_a_user_the_second_hits_at_every_length(
    checkpoint: Callable[[str], Path], name: str, opening: int
) -> None:
    asked = [Asked(length, 1, opening) for length in LENGTHS]
    rows = seconds(Run(adapter_for(checkpoint(name)), CACHED), asked)

    assert cached(rows) == [tail_end(length) for length in LENGTHS]
    assert all(0 <= one.common - found < 2 * TAIL_TOKENS for one, found in zip(asked, cached(rows), strict=True))


@pytest.mark.parametrize("opening", OPENINGS.values(), ids=OPENINGS)
@pytest.mark.parametrize("user", [OPENINGS["not thinking"] + CLOSING + WORD, 20])
def test_behind_a_system_message_of_every_length_the_second_hits(adapter: Adapter, opening: int, user: int) -> None:
    """`user` counts the tokens behind the system message: so its end is at every distance from a multiple of anything."""
    asked = [Asked(length, 1, opening, length - user) for length in LENGTHS if length - user >= TAIL_TOKENS]
    rows = seconds(Run(adapter, CACHED), asked)

    assert all(found >= one.system for one, found in zip(asked, cached(rows), strict=True))
    assert all(0 <= one.common - found < 35 for one, found in zip(asked, cached(rows), strict=True))


def test_behind_one_system_message_the_second_hits_at_every_length(adapter: Adapter) -> None:
    asked = [Asked(length, 1, system=18) for length in LENGTHS if length >= 36]
    rows = seconds(Run(adapter, CACHED), asked)

    assert all(0 <= one.common - found <= 35 for one, found in zip(asked, cached(rows), strict=True))
    assert all(found >= one.system for one, found in zip(asked, cached(rows), strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES if ALL else PROMISED)
def test_eight_hit_what_one_left_and_of_fifteen_at_once_one_computes_for_all(build: Callable[[str], Adapter], name: str) -> None:
    run = Run(build(name), CACHED)
    Asked(59, 99).submit(run, salt="warm")
    run.finish()
    warm = [Asked(59, number).submit(run, salt="warm") for number in range(8)]
    run.finish()
    cold = [Asked(59, number).submit(run, salt="cold") for number in range(15)]
    run.finish()

    assert min(cached(warm)) >= tail_end(59)
    assert sum(found >= tail_end(59) for found in cached(cold)) >= 14


def test_two_that_arrive_first_and_share_more_take_nothing_from_those_behind_them(adapter: Adapter) -> None:
    """They are cut where they part, which is of no use to the others: these go on from the checkpoint before it."""
    for length in range(33, 66):
        run = Run(adapter, dataclasses.replace(CACHED, exact=False))
        base = Asked(length, 1).prompt
        first = Asked(length, 0).common

        def submit(word: int, second: int, base: list[int] = base, first: int = first, run: Run = run) -> Sequence:
            return run.submit([*base[:first], word, second, *base[first + 2 :]], 1)

        rows = [submit(1, number) for number in range(2)]
        run.turn()
        rows += [submit(2 + number // 5, number) for number in range(13)]
        run.finish()

        assert sum(found >= tail_end(length) for found in cached(rows)) >= 14, (length, cached(rows))


def test_what_goes_on_from_there_answers_as_cold(adapter: Adapter) -> None:
    asked = [Asked(length, word) for length in (20, 33, 59, 65) for word in (1, 2)]
    run, rows = Run(adapter, CACHED), []
    for one in asked:
        rows.append(one.submit(run, tokens=6))
        run.finish()

    assert all(cached(rows)[1::2])
    assert [row.output for row in rows] == answers(adapter, [one.prompt for one in asked], 6)


def checkpoints(run: Run) -> list[Node]:
    assert run.engine.prefix.tree is not None
    return [node for node in run.engine.prefix.tree.nodes() if node.checkpoint is not None]


def test_a_conversation_of_any_length_keeps_one_checkpoint_for_other_last_words(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    for length, turn in itertools.product((59, 120, 181, 200), range(2)):
        prompt = [*TEXT, *TEXT][:length]
        boundaries = tuple(end - 7 for end in (59, 120, 181, 200) if end <= length)
        run.engine.submit_all(Submit((turn,), prompt, (Sampling(temperature=0.0, max_tokens=1),), boundaries=boundaries))
        run.finish()

        (tail,) = (node for node in checkpoints(run) if node.is_tail)
        assert 0 <= tail_end(length) - tail.length <= TAIL_TOKENS  # where less than that is new it is that of the turn before


def test_where_prompts_parted_it_stays_when_one_of_them_grows(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    for one in (Asked(59, 1), Asked(59, 2)):
        one.submit(run)
        run.finish()
    run.submit([*Asked(59, 1).prompt, *TEXT[:60]], 1)
    run.finish()
    third = Asked(59, 3).submit(run)
    run.finish()

    assert cached([third]) == [tail_end(59)]
