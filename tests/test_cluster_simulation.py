"""The simulated cluster: every request ends, the real router beats the plain ones, and deaths cost nothing but time."""

from __future__ import annotations

import gzip
import json
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))
from bench.cluster.policies import POLICIES
from bench.cluster.simulation import Cluster, Death, Outcome, Simulation
from bench.cluster.trace import TracedRequest, made_up, multiplied, read_trace

CLUSTER = Cluster(4, cached_tokens=300_000)


@cache
def outcomes() -> dict[str, Outcome]:
    trace = made_up(250, 100.0)
    return {name: Simulation(Cluster(4, name, cached_tokens=300_000)).run(trace) for name in POLICIES}


def test_every_request_of_every_policy_has_a_first_token_and_an_end() -> None:
    for outcome in outcomes().values():
        assert len(outcome.first_token_seconds) == 250
        assert min(outcome.first_token_seconds) > 0
        assert outcome.num_unfinished == 0


def test_the_router_has_most_hits_of_one_big_cache_and_sooner_first_tokens_than_plain_policies() -> None:
    found = outcomes()
    whole = Simulation(Cluster(1, cached_tokens=4 * 300_000, max_rows=128)).run(made_up(250, 100.0))

    assert found["weft"].hits >= 0.9 * whole.hits
    assert found["weft"].mean <= 0.85 * found["least-loaded"].mean
    assert found["weft"].mean <= 0.45 * found["round-robin"].mean
    assert found["weft"].imbalance <= 1.1


def test_a_prefix_that_eight_share_is_computed_once_and_sixty_four_spread_it_by_need() -> None:
    def computed(count: int, num_own: int, policy: str) -> tuple[int, float]:
        trace = [TracedRequest(0.0, 8192 + num_own, 64, (*range(1, 17), 100 + place)) for place in range(count)]
        found = Simulation(Cluster(4, policy)).run(trace)
        return found.num_prompt_tokens - found.num_cached_tokens, found.percentile(95)

    assert computed(8, 64, "weft")[0] == 8192 + 8 * 64
    (work, late), (plain_work, plain_late) = computed(64, 512, "weft"), computed(64, 512, "least-loaded")
    assert work <= plain_work
    assert late <= 1.1 * plain_late


def test_two_fronts_that_know_nothing_of_each_other_have_the_hits_of_one() -> None:
    trace = made_up(250, 200.0)
    one = Simulation(CLUSTER).run(trace)
    two = Simulation(Cluster(4, cached_tokens=300_000, num_fronts=2)).run(trace)

    assert two.num_unfinished == 0
    assert two.hits >= 0.97 * one.hits
    assert two.mean <= 1.1 * one.mean


def test_a_replica_that_joins_gets_work_and_costs_conversations_no_hits() -> None:
    trace = made_up(250, 100.0)
    few = Simulation(Cluster(3, cached_tokens=300_000)).run(trace)
    joined = Simulation(CLUSTER, [Death(0.0, 3, 50.0)]).run(trace)

    assert joined.hits >= few.hits - 0.02
    assert joined.busy_seconds[-1] >= sum(joined.busy_seconds) / 2 / (2 * 4)  # it was there for half of the time


def test_fronts_that_hear_engines_late_lose_no_request_and_few_hits() -> None:
    trace = made_up(250, 200.0)
    late = Simulation(Cluster(4, cached_tokens=300_000, num_fronts=2, delay_seconds=1.0)).run(trace)

    assert late.num_unfinished == 0
    assert late.hits >= 0.9 * Simulation(CLUSTER).run(trace).hits


def test_the_same_trace_gives_the_same_outcome() -> None:
    trace = made_up(60, 20.0)

    assert Simulation(CLUSTER).run(trace) == Simulation(CLUSTER).run(trace)


def test_replicas_that_die_and_return_lose_no_request() -> None:
    deaths = [Death(10.0, 0, 8.0), Death(15.0, 1, 8.0), Death(30.0, 0, 5.0)]
    outcome = Simulation(CLUSTER, deaths).run(made_up(200, 60.0))

    assert outcome.num_unfinished == 0
    assert len(outcome.first_token_seconds) == 200
    assert outcome.num_moved > 0


def test_a_replica_that_never_returns_delays_nobody_until_its_next_engine() -> None:
    trace = made_up(60, 30.0)
    died = Simulation(CLUSTER, [Death(10.0, 0, 3600.0), Death(20.0, 1, 3600.0)]).run(trace)

    assert died.num_unfinished == 0
    assert max(died.first_token_seconds) < 60


@pytest.mark.parametrize("max_rows", [32, 4])
def test_a_client_with_many_requests_does_not_delay_one_with_a_single_one(max_rows: int) -> None:
    cluster = Cluster(4, cached_tokens=300_000, max_rows=max_rows)
    alone = TracedRequest(1.0, 4096, 100, tuple(range(10_000, 10_008)), "one")
    many = [TracedRequest(0.0, 8192, 400, tuple(range(16 * at, 16 * at + 16)), "many") for at in range(64)]
    quiet = Simulation(cluster).run([alone]).first_token_seconds[0]
    beside = dict(Simulation(cluster).run([*many, alone]).first_tokens)["one"]

    assert beside <= 3 * quiet


def test_a_trace_is_read_and_multiplied(tmp_path: Path) -> None:
    rows = [{"timestamp": 1000 * at, "input_length": 700, "output_length": 9, "hash_ids": [0, at + 1]} for at in range(3)]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    trace = read_trace(path)
    more = multiplied(trace, 3)

    assert [(one.at, one.num_prompt, one.num_output, one.blocks) for one in trace] == [
        (0.0, 700, 9, (0, 1)),
        (1.0, 700, 9, (0, 2)),
        (2.0, 700, 9, (0, 3)),
    ]
    assert len(more) == 9
    assert len({one.blocks for one in more}) == 9
    assert {one.blocks[0] for one in more} == {0}
    assert trace[0].prompt(8)[:64] == trace[1].prompt(8)[:64]
    assert trace[0].prompt(8)[64:] != trace[1].prompt(8)[64:]
    assert len(trace[0].prompt(8)) == 700 // 8
