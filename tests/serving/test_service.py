"""What the service decides before an engine is asked."""

from __future__ import annotations

from weft.serving.service import choice_seed


def test_the_first_choice_has_the_seed_given_and_the_others_seeds_derived_from_it() -> None:
    seeds = [choice_seed(-5, index) for index in range(4)]

    assert seeds[0] == -5
    assert len(set(seeds)) == 4
    assert seeds == [choice_seed(-5, index) for index in range(4)]
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_choices_without_a_seed_get_one_each_so_that_another_engine_draws_the_same() -> None:
    assert len({choice_seed(None, 0) for _ in range(100)}) == 100
