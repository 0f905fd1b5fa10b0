"""Rows with slow masks wait for their turn: the others' steps are their own, and every answer is the same."""

from __future__ import annotations

from collections.abc import Sequence as Items
from pathlib import Path

import pytest

import weft.model
from driver import Clock, Run, adapter_for
from sequences import sequence_of
from weft.engine.mask_prices import SHARE, SLOW_SECONDS, MaskPrices
from weft.engine.sequence import Sequence
from weft.grammar.compiler import Compiler
from weft.grammar.constraint import Mask, Masks, TokenDemand
from weft.ipc.limits import Sampling
from weft.ipc.messages import ConstraintSpec, GrammarSpec
from weft.model.adapter import Adapter

FOLDER = Path(weft.model.__file__).parent / "tiny-hybrid"
LETTERS = ConstraintSpec(GrammarSpec("regex", "[a-z ]*"))


@pytest.fixture(scope="module")
def adapter() -> Adapter:
    return adapter_for(FOLDER)


class SlowMasks(Masks):
    """Masks that say of themselves how long they took."""

    def __init__(self, vocab_size: int, told: float) -> None:
        super().__init__(vocab_size)
        self.told = told

    def fill(self, demands: Items[TokenDemand | None]) -> tuple[Mask | None, dict[int, str]]:
        filled = super().fill(demands)
        self.seconds = {row: self.told for row, demand in enumerate(demands) if demand is not None}
        return filled


def rows(*numbers: int) -> list[Sequence]:
    return [sequence_of([1, 2], 5, number) for number in numbers]


def test_a_row_with_a_slow_mask_sits_out_until_the_others_had_their_share() -> None:
    clock = Clock()
    prices, (slow, quick) = MaskPrices(clock), rows(1, 2)
    prices.charge(slow, 0.05)

    assert prices.choose([slow, quick]) == (quick,)
    clock.now = 0.05 / SHARE - 0.01
    assert prices.choose([slow, quick]) == (quick,)
    clock.now = 0.05 / SHARE
    assert prices.choose([slow, quick]) == (slow, quick)


def test_six_slow_rows_take_no_more_of_the_time_than_one() -> None:
    clock = Clock()
    prices, (quick, *slow) = MaskPrices(clock), rows(*range(7))
    for row in slow:
        prices.charge(row, 0.05)
    clock.now = 6 * 0.05 / SHARE - 0.01

    assert prices.choose([quick, *slow]) == (quick,)


def test_nobody_waits_where_all_are_slow() -> None:
    prices, slow = MaskPrices(Clock()), rows(1, 2)
    for row in slow:
        prices.charge(row, 1.0)

    assert prices.choose(slow) == tuple(slow)


def test_a_row_whose_mask_is_quick_again_waits_no_longer() -> None:
    prices, (one, other) = MaskPrices(Clock()), rows(1, 2)
    prices.charge(one, 1.0)
    prices.charge(one, SLOW_SECONDS / 2)

    assert prices.choose([one, other]) == (one, other)


def test_a_slow_row_lets_its_neighbour_go_ahead_and_both_answers_are_as_alone(adapter: Adapter) -> None:
    compiler = Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))
    sampling = Sampling(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = Run(adapter)
    expected = [alone.engine.submit([5, 6, 7], sampling), alone.engine.submit([5, 6], sampling, compiler.constraint(LETTERS))]
    alone.finish()
    clock = Clock()
    run = Run(adapter, clock=clock)
    run.engine.masks = SlowMasks(4096, told=1.0)
    quick = run.engine.submit([5, 6, 7], sampling)
    slow = run.engine.submit([5, 6], sampling, compiler.constraint(LETTERS))
    while not quick.is_finished:
        clock.now += 0.01
        run.turn()
    num_slow = len(slow.output)
    run.finish()

    assert num_slow <= 1
    assert [quick.output, slow.output] == [one.output for one in expected]


def test_masks_are_measured_row_by_row_where_only_one_is_filled() -> None:
    compiler = Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))
    masks, matcher = Masks(4096), compiler.compile(GrammarSpec("regex", "[a-z ]*"))
    masks.fill([None, TokenDemand(matcher=matcher)])
    measured = list(masks.seconds)
    masks.fill([None, None])

    assert measured == [1]
    assert masks.seconds == {}  # or it would be charged to another row


def test_masks_are_measured_one_by_one_after_a_step_that_was_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.grammar.constraint.SUSPICIOUS_SECONDS", -1.0)  # every step is
    compiler = Compiler(FOLDER / "tokenizer.json", 4096, (4080, 4082))
    masks = Masks(4096)
    demands = [TokenDemand(matcher=compiler.compile(GrammarSpec("regex", regex))) for regex in ("[a-z ]*", "[0-9]*")]
    together, _ = masks.fill(demands)
    first = dict(masks.seconds)
    one_by_one, _ = masks.fill(demands)

    assert first == {}
    assert list(masks.seconds) == [0, 1]
    assert together is not None
    assert one_by_one is not None
    assert (together == one_by_one).all()
