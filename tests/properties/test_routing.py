"""The router and its index against plain definitions, for any prompts, caches and loads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from thoroughness import ALL
from weft.engine.prefix_reports import PrefixReports
from weft.ipc.limits import Sampling
from weft.ipc.messages import EngineStatus, ReportedChunk, Submit
from weft.memory.prefix_tree import PrefixTree, key_of, root_key
from weft.serving.in_flight import EngineClient
from weft.serving.prefix_index import PrefixIndex, num_common
from weft.serving.router import BUSY_SECONDS, BUSY_WEIGHT, IDLE_WEIGHT, NEAR, SMALL_SECONDS, Router, wait_seconds

PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=12)
NAMES = ("a", "b", "c")
MORE = 20 if ALL else 1


class Loaded:
    """A replica with so many prompt tokens to compute, and a speed."""

    max_rows = 16
    answer_seconds = 0.0

    def __init__(self, name: str, queued: int, seconds_per_token: float) -> None:
        self.name = name
        self.client = EngineClient()
        self.status = EngineStatus(queued_tokens=queued, seconds_per_token=seconds_per_token)


def chunks_of(prompt: list[int], cuts: set[int], salt: str = "") -> list[ReportedChunk]:
    """A prompt's chunks that end at these places, as an engine would report them."""
    found, key, start = [], root_key(salt), 0
    for end in sorted(cut for cut in cuts if 0 < cut <= len(prompt)):
        parent, key = key, key_of(key, prompt[start:end])
        found.append(ReportedChunk(key, parent, end - start, has_checkpoint=end % 3 != 0))
        start = end
    return found


CACHES = st.lists(st.tuples(st.sampled_from(NAMES), PROMPTS, st.sets(st.integers(1, 12))), max_size=8)


@given(CACHES, PROMPTS)
@settings(max_examples=100 * MORE, deadline=None)
def test_a_match_is_the_longest_chunk_end_with_a_checkpoint_that_the_replica_has(
    caches: list[tuple[str, list[int], set[int]]], prompt: list[int]
) -> None:
    index, ends = PrefixIndex(), dict.fromkeys(NAMES, 0)
    for name, cached, cuts in caches:
        chunks = chunks_of(cached, cuts)
        index.report(name, chunks, [])
        for end in (cut for cut in cuts if 0 < cut <= len(cached)):
            if prompt[:end] == cached[:end] and end < len(prompt) and end % 3 != 0:
                ends[name] = max(ends[name], end)

    assert index.matches(prompt, "") == {name: end for name, end in ends.items() if end}


@given(CACHES)
@settings(max_examples=50 * MORE, deadline=None)
def test_what_a_replica_had_is_forgotten_with_it_and_nothing_is_left_when_all_are_gone(
    caches: list[tuple[str, list[int], set[int]]],
) -> None:
    index = PrefixIndex()
    for name, cached, cuts in caches:
        index.report(name, chunks_of(cached, cuts), [])
    index.forget("a")
    for name, cached, cuts in caches:
        if name == "a":
            assert "a" not in index.matches([*cached, 0], "")
        else:
            index.report(name, [], [chunk.key for chunk in chunks_of(cached, cuts)])

    assert len(index) == 0
    assert index._sizes == {}


@given(CACHES, st.integers(0, 5))
@settings(max_examples=50 * MORE, deadline=None)
def test_the_index_is_bounded(caches: list[tuple[str, list[int], set[int]]], most: int) -> None:
    index = PrefixIndex(most)
    for name, cached, cuts in caches:
        index.report(name, chunks_of(cached, cuts), [])

        assert len(index) <= most


def test_a_salt_is_a_world_of_its_own() -> None:
    index = PrefixIndex()
    index.report("a", chunks_of([1, 2, 3, 4], {4}, "salt"), [])

    assert index.matches([1, 2, 3, 4, 5], "") == {}
    assert index.matches([1, 2, 3, 4, 5], "salt") == {"a": 4}


def test_a_scope_is_a_world_of_its_own() -> None:
    index = PrefixIndex()
    key = key_of(root_key("", "tenant"), [1, 2, 3, 4])
    index.report("a", [ReportedChunk(key, root_key("", "tenant"), 4, has_checkpoint=True)], [])

    assert index.matches([1, 2, 3, 4, 5], "") == {}
    assert index.matches([1, 2, 3, 4, 5], "", "tenant") == {"a": 4}


LOADS = st.lists(st.tuples(st.integers(0, 50_000), st.sampled_from([0.0001, 0.001, 0.01])), min_size=2, max_size=5)


def test_where_all_replicas_are_busy_a_prompt_waits_longer_for_what_is_cached() -> None:
    def chosen(queued: tuple[int, int]) -> str:
        replicas = [Loaded(name, one, 0.01) for name, one in zip("ab", queued, strict=True)]
        router, prompt = Router(), list(range(1000, 1200))
        router.index.report("a", [ReportedChunk(key_of(root_key(""), prompt[:100]), root_key(""), 100, has_checkpoint=True)], [])
        return router.choose(Submit((0,), prompt, (Sampling(),)), replicas, replicas)[0].name

    assert chosen((450, 0)) == "b"
    assert chosen((600, 200)) == "a"


@given(LOADS, st.dictionaries(st.integers(0, 4), st.integers(1, 199), max_size=3))
@settings(max_examples=100 * MORE, deadline=None)
def test_no_replica_has_the_first_token_much_sooner_than_the_chosen_one(
    loads: list[tuple[int, float]], cached: dict[int, int]
) -> None:
    replicas, router, prompt = [Loaded(str(at), *load) for at, load in enumerate(loads)], Router(), list(range(1000, 1200))
    for at, size in cached.items():
        key = key_of(root_key(""), prompt[:size])
        router.index.report(str(at), [ReportedChunk(key, root_key(""), size, has_checkpoint=True)], [])
    matched = {str(at): size for at, size in cached.items()}
    chosen, placement = router.choose(Submit((0,), prompt, (Sampling(),)), replicas, replicas)

    best = max([matched.get(one.name, 0) for one in replicas])
    busy = sum(min(1.0, wait_seconds(one, replicas) / BUSY_SECONDS) for one in replicas) / len(replicas)
    weight = IDLE_WEIGHT + busy * (BUSY_WEIGHT - IDLE_WEIGHT)

    def seconds(one: Loaded) -> float:
        has = matched.get(one.name, 0)
        return wait_seconds(one, replicas) + (len(prompt) - has + weight * (best - has)) * one.status.seconds_per_token

    least = min(seconds(one) for one in replicas)
    assert seconds(chosen) <= max(least * NEAR, least + SMALL_SECONDS) + 1e-9
    assert placement.matched == matched.get(chosen.name, 0)
    assert placement.best == best


@given(LOADS, st.data())
@settings(max_examples=50 * MORE, deadline=None)
def test_only_a_replica_with_a_place_is_chosen(loads: list[tuple[int, float]], data: st.DataObject) -> None:
    replicas = [Loaded(str(at), *load) for at, load in enumerate(loads)]
    places = data.draw(st.lists(st.sampled_from(replicas), min_size=1, unique_by=lambda one: one.name))

    assert Router().choose(Submit((0,), [1, 2, 3], (Sampling(),)), places, replicas)[0] in places


@given(PROMPTS, PROMPTS)
@settings(max_examples=100 * MORE, deadline=None)
def test_the_common_beginning_is_as_long_as_it_is(one: list[int], other: list[int]) -> None:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))

    assert num_common(one, other) == same


class Bytes:
    """A stored state of some bytes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def split(self, count: int) -> tuple[Bytes, Bytes]:
        return Bytes(count), Bytes(self.nbytes - count)


@given(st.lists(st.tuples(PROMPTS, st.sets(st.integers(1, 12), min_size=1)), max_size=12), st.booleans(), st.integers(5, 60))
@settings(max_examples=100 * MORE, deadline=None)
def test_an_index_fed_by_reports_has_what_the_tree_has(
    prompts: list[tuple[list[int], set[int]]], can_split: bool, budget: int
) -> None:
    tree, index = PrefixTree(budget, lambda: 0.0, can_split=can_split), PrefixIndex()
    reports = PrefixReports(tree)
    for prompt, cuts in prompts:
        node = tree.match(prompt, tree.root(), iter(()))
        tree.pin(node)
        for end in sorted(cut for cut in cuts if node.length < cut <= len(prompt)):
            before, node = node, tree.enter(node, tuple(prompt[node.length : end]), Bytes(end - node.length), Bytes(0))
            tree.pin(node)
            tree.unpin(before)
        tree.unpin(node)
        index.report("a", *reports.take())

        nodes = {node.key for node in tree.nodes()}
        assert set(index._chunks) == nodes
        for one in tree.nodes():
            whole = [token for node in one.path() for token in node.tokens]
            assert (index.matches([*whole, 0], "").get("a", 0) >= one.length) == (one.checkpoint is not None)
