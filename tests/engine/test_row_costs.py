"""What one more row adds to a step: assumed, then learned from steps of different widths."""

from __future__ import annotations

import itertools

import pytest

from weft.engine.row_costs import RowCosts

ASSUMED = 0.2


def learned(true: float, widths: list[int], num_steps: int = 2000) -> RowCosts:
    costs = RowCosts(ASSUMED)
    for num_rows in itertools.islice(itertools.cycle(widths), num_steps):
        costs.measure(num_rows, 0.01 * (1 + true * (num_rows - 1)))
    return costs


@pytest.mark.parametrize("true", [0.0, 0.05, 0.2, 0.5])
def test_the_price_of_a_row_is_learned_from_steps_of_different_widths(true: float) -> None:
    assert learned(true, [1, 4, 8, 11]).added == pytest.approx(true, abs=0.02)


def test_steps_of_one_width_tell_nothing_of_it() -> None:
    assert learned(0.0, [8]).added == pytest.approx(ASSUMED)


def test_a_step_that_was_disturbed_changes_little() -> None:
    costs = learned(0.05, [4, 8])
    before = costs.added
    costs.measure(8, 10.0)

    assert costs.added == pytest.approx(before, abs=0.05)


def test_where_rows_cost_nothing_that_is_not_put_in_doubt() -> None:
    costs = RowCosts(0.0)
    for num_rows in (1, 16, 1, 16):
        costs.measure(num_rows, 0.01 * num_rows)

    assert costs.of(16) == 1
