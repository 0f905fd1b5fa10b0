"""Prompts that begin alike, in one engine: who computes what, who inherits, what is told, and what is found to be wrong."""

from __future__ import annotations

import dataclasses
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import msgspec
import pytest

from driver import SMALL, Run, adapter_for, answers, random_prompts, restored
from sequences import sequence_of
from waiting import until
from weft.engine.faults import Rule
from weft.engine.host import Canary
from weft.engine.prefill_rate import PrefillRate
from weft.engine.prefix import PrefixSharing
from weft.engine.sequence import Sequence
from weft.ipc.limits import Sampling
from weft.ipc.messages import AskPrefixes, Prefixes, PrefixReuse, Submit
from weft.memory.disk import DiskTier
from weft.memory.disk_files import Packed
from weft.model.adapter import Adapter
from weft.model.saved_state import SavedState, pack

CACHED = dataclasses.replace(SMALL, cache_bytes=1 << 30)
LOOSE = dataclasses.replace(CACHED, chunk_tokens=64)
TRUNK, TAIL, OTHER = random_prompts(128, (100, 20, 20), seed=3)


@pytest.fixture(scope="module")
def adapter(checkpoint: Callable[[str], Path]) -> Adapter:
    return adapter_for(checkpoint("qwen3_5"))


def counted(run: Run) -> list[int]:
    """Tokens of every chunk that is begun from now on."""
    counts: list[int] = []
    begin = run.engine.runner._start_chunk

    def counting(row: object, memory: object) -> object:
        counts.append(row.count)  # type: ignore[attr-defined]
        return begin(row, memory)  # type: ignore[arg-type]

    run.engine.runner._start_chunk = counting  # type: ignore[method-assign,assignment]
    return counts


def told(sequence: Sequence) -> PrefixReuse | None:
    return sequence.timings.reuse


@pytest.mark.parametrize("turns", range(1, 16, 2))
def test_whoever_needs_the_same_chunk_inherits_it_half_done(adapter: Adapter, turns: int) -> None:
    run = Run(adapter, CACHED)
    run.submit(OTHER[:5], 60)  # a decoding neighbour, so that chunks are cut into slices
    for _ in range(4):
        run.turn()
    counts = counted(run)
    leader, follower = run.submit(TRUNK + TAIL, 4), run.submit(TRUNK + OTHER, 4)
    for _ in range(turns):
        run.turn()
    run.engine.cancel(leader)
    run.finish()

    assert sum(counts) == len(TRUNK + OTHER) - 1  # not a token more than it would have computed alone
    assert follower.output == answers(adapter, [TRUNK + OTHER], 4)[0]


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
def test_a_prompt_is_known_while_its_answer_is_still_being_written(checkpoint: Callable[[str], Path], name: str) -> None:
    run = Run(adapter_for(checkpoint(name)), CACHED)
    first = run.submit(TRUNK, 100)
    while not first.output:
        run.turn()
    again, longer = run.submit(TRUNK, 2), run.submit(TRUNK + TAIL, 2)
    while not (again.is_finished and longer.is_finished):
        run.turn()

    assert not first.is_finished
    assert [again.timings.cached_tokens, longer.timings.cached_tokens] == [len(TRUNK) - 1] * 2
    run.finish()


@pytest.mark.parametrize("turns", [1, 3])
def test_whoever_needs_another_chunk_inherits_nothing(adapter: Adapter, turns: int) -> None:
    run = Run(adapter, CACHED)
    run.submit(TRUNK[:5], 60)  # a decoding neighbour, so that chunks are cut into slices
    for _ in range(4):
        run.turn()
    leader, other = run.submit(TAIL * 2, 4), run.submit(OTHER * 2, 4)
    for _ in range(turns):
        run.turn()
    assert leader.is_amid_chunk
    run.engine.cancel(leader)
    run.finish()

    assert other.output == answers(adapter, [OTHER * 2], 4)[0]


@pytest.mark.parametrize("turns", [0, 1])
def test_prompts_that_part_amid_a_chunk_share_it_up_to_there(adapter: Adapter, turns: int) -> None:
    run = Run(adapter, LOOSE)
    counts = counted(run)
    prompts = [TRUNK + [number] * 5 for number in range(8)]
    rows = [run.submit(prompts[0], 3)]
    for _ in range(turns):
        run.turn()
    rows += [run.submit(prompt, 3) for prompt in prompts[1:]]
    run.finish()

    assert sum(counts) == len(TRUNK) + 8 * 4  # the last token of each goes into its first step
    assert [row.output for row in rows] == answers(adapter, prompts, 3)


def test_a_second_prompt_that_parts_is_cut_there_for_the_third(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    rows = []
    prompts = [TRUNK + tail * 3 for tail in (TAIL, OTHER, TAIL[::-1])]
    for prompt in prompts:
        rows.append(run.submit(prompt, 3))
        run.finish()

    assert rows[2].timings.cached_tokens == len(TRUNK)
    assert [row.output for row in rows] == answers(adapter, prompts, 3)


def test_a_prompt_goes_on_from_the_boundary_before_the_place_where_it_parts(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    chosen = (Sampling(temperature=0.0, max_tokens=3, ignore_eos=True),)
    prompts = [TRUNK + TAIL, TRUNK[:50] + OTHER]
    rows = []
    for number, prompt in enumerate(prompts):
        rows += run.engine.submit_all(Submit((number,), prompt, chosen, boundaries=(37, 110)))
        run.finish()

    assert [row.timings.cached_tokens for row in rows] == [0, 37]
    assert [row.output for row in rows] == answers(adapter, prompts, 3)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3_text"])
@pytest.mark.parametrize("at_once", [True, False])
def test_eight_short_prompts_that_differ_in_their_last_words_share_what_one_before_them_left(
    checkpoint: Callable[[str], Path], name: str, at_once: bool
) -> None:
    adapter = adapter_for(checkpoint(name))
    common = TRUNK[:47]
    prompts = [[*common, *[place + 1] * (3 + place)] for place in range(9)]  # 50 to 58 tokens
    run = Run(adapter, dataclasses.replace(CACHED, chunk_tokens=128))  # as it is on CPU: each prompt is less than a chunk
    run.submit(prompts.pop(), 2)
    run.finish()
    rows = []
    for prompt in prompts:
        rows.append(run.submit(prompt, 4))
        if not at_once:
            run.finish()
    run.finish()

    least = len(common) if adapter.is_positional else 32
    assert all(row.timings.cached_tokens >= least for row in rows), [row.timings.cached_tokens for row in rows]
    assert [row.output for row in rows] == answers(adapter, prompts, 4)


def test_restoring_what_costs_more_than_computing_is_left_alone(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    prefix = run.engine.prefix
    assert isinstance(prefix, PrefixSharing)
    first = run.submit(TRUNK + TAIL, 2)
    run.turn()
    run.turn()
    assert first.has_caches
    found = first.prefix.node
    later = sequence_of(TRUNK + OTHER, 2)

    run.engine.runner.prefill_rate = PrefillRate()
    assert prefix._is_worth_restoring(later, found)  # it has no states of its own: there is nothing to throw away
    assert not prefix._is_worth_restoring(first, found)
    run.engine.runner.prefill_rate.measure(1, 1.0)
    first.num_computed = 0
    assert prefix._is_worth_restoring(first, found)


class TestWhatIsTold:
    def test_why_a_prompt_was_computed(self, adapter: Adapter) -> None:
        run = Run(adapter, CACHED)
        rows = []
        for prompt in (TRUNK + TAIL, TRUNK + TAIL, TRUNK + OTHER, TRUNK + TAIL[::-1], TRUNK[:90] + OTHER):
            rows.append(run.submit(prompt, 1))
            run.finish()

        assert told(rows[0]) == PrefixReuse("differs", 0, 0, TRUNK[0], None)
        assert told(rows[1]) == PrefixReuse("whole", 119)
        assert told(rows[2]) == PrefixReuse("differs", 96, 100, OTHER[0], TAIL[0])
        assert told(rows[3]) == PrefixReuse("differs", 96, 100, TAIL[-1], OTHER[0])
        assert told(rows[4]) == PrefixReuse("checkpoint", 64, 90, OTHER[0], TRUNK[90])  # at 80 none was kept
        assert [row.timings.cached_tokens for row in rows] == [0, 119, 96, 96, 64]

    def test_that_all_of_it_had_to_be_read(self, adapter: Adapter) -> None:
        run = Run(adapter, CACHED)
        for _ in range(2):
            row = run.submit(TRUNK, 1, prompt_logprobs=0)
            run.finish()

        assert told(row) == PrefixReuse("logprobs")
        assert row.timings.cached_tokens == 0

    def test_that_nothing_is_kept(self, adapter: Adapter) -> None:
        run = Run(adapter)
        row = run.submit(TRUNK, 1)
        run.finish()

        assert told(row) == PrefixReuse("off")

    def test_of_forks_too(self, adapter: Adapter) -> None:
        run = Run(adapter, CACHED)
        chosen = (Sampling(temperature=0.0, max_tokens=2, ignore_eos=True),) * 2
        first, second = run.engine.submit_all(Submit((7, 8), TRUNK, chosen))
        run.finish()

        assert told(first) == PrefixReuse("differs", 0, 0, TRUNK[0], None)
        assert told(second) == PrefixReuse("whole", 99)


def test_salts_share_nothing(adapter: Adapter) -> None:
    run = Run(adapter, CACHED)
    chosen = (Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),)
    rows = []
    for number, salt in enumerate(["", "mine", "mine"]):
        rows += run.engine.submit_all(Submit((number,), TRUNK, chosen, salt=salt))
        run.finish()

    assert [row.timings.cached_tokens for row in rows] == [0, 0, 99]
    assert told(rows[1]) == PrefixReuse("salt")


def in_scopes(adapter: Adapter, *scopes: str) -> tuple[list[Sequence], list[list[int]], Prefixes]:
    """The same prompt in each scope, one after the other: rows, the sizes of what each computed, and what the last is shown."""
    run, chosen = Run(adapter, CACHED), (Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),)
    rows, sizes, counts = [], [], counted(run)
    for number, scope in enumerate(scopes):
        counts.clear()
        rows += run.engine.submit_all(Submit((number,), TRUNK, chosen, scope=scope, tenant=scope))
        run.finish()
        sizes.append(list(counts))
    return rows, sizes, run.engine.prefix.answer(AskPrefixes(0, scope=scopes[-1]), 1)


def test_scopes_share_nothing_and_each_lists_its_own(adapter: Adapter) -> None:
    """A tenant's prompt is computed in the same chunks whether another sent it or not: its time tells nothing."""
    rows, sizes, shown = in_scopes(adapter, "anna", "ben")
    _, sizes_alone, shown_alone = in_scopes(adapter, "ben")
    repeated, _, _ = in_scopes(adapter, "anna", "ben", "anna")

    assert [row.timings.cached_tokens for row in rows] == [0, 0]
    assert sizes[1] == sizes_alone[0]
    assert told(rows[1]) == PrefixReuse("differs", 0, 0, TRUNK[0])  # as if nothing had ever been asked
    assert [row.timings.cached_tokens for row in repeated] == [0, 0, 99]
    still = [msgspec.structs.replace(node, idle_seconds=0.0) for node in shown.nodes]
    assert still == [msgspec.structs.replace(node, idle_seconds=0.0) for node in shown_alone.nodes]
    assert (shown.num_nodes, shown.held_bytes, shown.disk_bytes) == (shown_alone.num_nodes, shown_alone.held_bytes, 0)


class TestDisk:
    def tier(self, folder: Path) -> DiskTier:
        disk = DiskTier(folder, "0" * 32, 1 << 30)
        disk.open()
        return disk

    def test_one_load_serves_all_that_wait_for_it(self, adapter: Adapter, tmp_path: Path) -> None:
        first = Run(adapter, CACHED, disk=self.tier(tmp_path))
        first.submit(TRUNK + TAIL, 1)
        first.finish()
        first.engine.prefix.disk.close(10)  # type: ignore[union-attr]
        run = Run(adapter, CACHED, disk=self.tier(tmp_path))
        counts = counted(run)
        rows = [run.submit(TRUNK + tail, 3) for tail in (TAIL, OTHER, TAIL)]
        run.finish()

        assert sum(counts) == 119 - 96  # what the second has after the trunk's last checkpoint
        assert [row.output for row in rows] == answers(adapter, [TRUNK + tail for tail in (TAIL, OTHER, TAIL)], 3)

    def test_damage_costs_the_time_to_compute_again(self, adapter: Adapter, tmp_path: Path) -> None:
        first = Run(adapter, CACHED, disk=self.tier(tmp_path))
        first.submit(TRUNK + TAIL, 1)
        first.finish()
        first.engine.prefix.disk.close(10)  # type: ignore[union-attr]
        run = Run(adapter, CACHED, disk=self.tier(tmp_path))
        files = sorted(tmp_path.rglob("*.safetensors"))
        for path in files:
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
        row = run.submit(TRUNK + TAIL, 3)
        run.finish()
        run.engine.prefix.disk.close(10)  # type: ignore[union-attr]

        assert row.timings.cached_tokens == 0
        assert row.output == answers(adapter, [TRUNK + TAIL], 3)[0]

    @pytest.mark.parametrize(
        ("part", "complaint"),
        [
            ("block", "layer 2 has no keys and values of shape"),
            ("checkpoint", "layer 0 of its checkpoint: state 1 is (1, 64, 32)"),
        ],
    )
    def test_states_of_another_rank_are_computed_again(
        self,
        adapter: Adapter,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        part: str,
        complaint: str,
    ) -> None:
        """The file is whole and of this model; only what it holds has fewer axes."""

        def flattened(saved: SavedState) -> Packed:
            packed = pack(saved)
            if any(isinstance(layer, tuple) for layer in saved.layers) == (part == "checkpoint"):
                return packed
            planes = tuple(dataclasses.replace(one, shape=(1, math.prod(one.shape[:-1]), one.shape[-1])) for one in packed.planes)
            return dataclasses.replace(packed, planes=planes)

        with monkeypatch.context() as patch:
            patch.setattr("weft.engine.prefix.pack", flattened)
            first = Run(adapter, CACHED, disk=self.tier(tmp_path))
            first.submit(TRUNK + TAIL, 1)
            first.finish()
            first.engine.prefix.disk.close(10)  # type: ignore[union-attr]
        run = Run(adapter, CACHED, disk=self.tier(tmp_path))
        row = run.submit(TRUNK + TAIL, 3)
        run.finish()
        run.engine.prefix.disk.close(10)  # type: ignore[union-attr]

        assert complaint in caplog.text
        assert row.timings.cached_tokens == 0
        assert row.output == answers(adapter, [TRUNK + TAIL], 3)[0]

    def test_salts_share_nothing_there_either(self, adapter: Adapter, tmp_path: Path) -> None:
        chosen = (Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),)
        cached = []
        for number, salt in enumerate(["mine", "", "yours", "mine"]):
            run = Run(adapter, CACHED, disk=self.tier(tmp_path))
            (row,) = run.engine.submit_all(Submit((number,), TRUNK, chosen, salt=salt))
            run.finish()
            run.engine.prefix.disk.close(10)  # type: ignore[union-attr]
            cached.append(row.timings.cached_tokens)

        assert cached == [0, 0, 0, 99]

    def test_no_token_is_left_to_be_computed_alone(self, adapter: Adapter, tmp_path: Path) -> None:
        first = Run(adapter, CACHED, disk=self.tier(tmp_path))
        first.submit(TRUNK, 1)
        first.finish()
        first.engine.prefix.disk.close(10)  # type: ignore[union-attr]
        cached = []
        for length in (65, 66, 67):
            run = Run(adapter, CACHED, disk=self.tier(tmp_path))
            counts = counted(run)
            row = run.submit(TRUNK[:length], 3)
            run.finish()
            cached.append(row.timings.cached_tokens)
            assert 1 not in counts
            assert row.output == answers(adapter, [TRUNK[:length]], 3)[0]

        assert cached == [64, 0, 64]  # of 66 tokens the last but one would be left

    def test_what_a_failed_row_computed_leaves_the_disk_too(self, adapter: Adapter, tmp_path: Path) -> None:
        run = Run(adapter, CACHED, disk=self.tier(tmp_path))
        run.engine.faults.rules = [Rule("logits", TAIL[0], after=2)]
        failing = run.submit(TRUNK + TAIL, 9)
        while not failing.output:
            run.turn()
        until(lambda: list(tmp_path.rglob("*.safetensors")))
        run.finish()
        run.engine.prefix.disk.close(10)  # type: ignore[union-attr]

        assert failing.finish == "error"
        assert not list(tmp_path.rglob("*.safetensors"))

    def test_a_folder_that_vanishes_costs_nothing_else(self, adapter: Adapter, tmp_path: Path) -> None:
        run = Run(adapter, CACHED, disk=self.tier(tmp_path / "cache"))
        run.submit(TRUNK, 1)
        run.finish()
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        tree = run.engine.prefix.tree
        assert tree is not None
        tree.clear()
        row = run.submit(TRUNK + TAIL, 3)
        run.finish()

        assert row.output == answers(adapter, [TRUNK + TAIL], 3)[0]


class TestCanary:
    def kept(self, adapter: Adapter) -> tuple[Run, Canary]:
        run = Run(adapter, CACHED)
        for tail in (TAIL, OTHER):
            run.submit(TRUNK + tail, 1)
        run.finish()
        assert run.engine.prefix.tree is not None
        return run, Canary(run.engine.prefix, run.engine.prefix.tree, random.Random(1))

    def test_of_three_hundred_requests_to_a_hybrid_mixture_of_experts_nothing_wrong_is_kept(
        self, checkpoint: Callable[[str], Path]
    ) -> None:
        mixture, dice = adapter_for(checkpoint("qwen3_5_moe")), random.Random(2)
        prompts = [TRUNK[:first] + tail[:last] for first in (20, 60, 100) for tail in (TAIL, OTHER) for last in (2, 20)]
        alone = [answers(mixture, [prompt], 6)[0] for prompt in prompts]
        run = Run(mixture, CACHED)
        rows = []
        for _ in range(300):
            which = dice.randrange(len(prompts))
            rows.append((which, run.submit(prompts[which], dice.randint(1, 6))))
            if dice.random() < 0.3:
                run.turn()
        run.finish()
        assert run.engine.prefix.tree is not None
        canary = Canary(run.engine.prefix, run.engine.prefix.tree, dice)
        while canary.check():
            pass

        assert all(row.output == alone[which][: row.max_tokens] for which, row in rows)
        assert sum(row.timings.cached_tokens > 0 for _, row in rows) > 250
        assert canary.num_wrong == 0
        assert canary.num_checked >= len(run.engine.prefix.tree)

    def test_what_is_right_stays(self, adapter: Adapter) -> None:
        run, canary = self.kept(adapter)
        before = list(run.engine.prefix.tree.nodes())  # type: ignore[union-attr]
        while canary.check():
            pass

        assert canary.num_wrong == 0
        assert canary.num_checked >= len(before)
        assert list(run.engine.prefix.tree.nodes()) == before  # type: ignore[union-attr]

    @pytest.mark.parametrize("what", ["block", "checkpoint"])
    def test_what_is_wrong_goes_with_all_behind_it(self, adapter: Adapter, what: str) -> None:
        run, canary = self.kept(adapter)
        tree = run.engine.prefix.tree
        assert tree is not None
        wrong = tree.match(TRUNK[:65], tree.root(), iter(range(16, 65, 16)))
        assert wrong.length == 64
        stored = getattr(wrong, what)
        layer = next(index for index, layer in enumerate(stored.layers) if layer is not None)
        if what == "block":
            keys, values = stored.layers[layer]
            stored.layers[layer] = (keys * 1.1, values)
        else:
            stored.layers[layer].cache[0] = mx.zeros_like(stored.layers[layer].cache[0]) + mx.nan
        while canary.check():
            pass

        assert canary.num_wrong == 1
        assert all(node.length < 64 for node in tree.nodes())
        row = run.submit(TRUNK + TAIL, 3)
        run.finish()
        assert row.output == answers(adapter, [TRUNK + TAIL], 3)[0]


def test_the_next_turn_of_a_conversation_goes_on_with_the_caches_of_the_last_and_nothing_is_copied(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    first = run.submit(TRUNK, 4)
    run.finish()
    counts = restored(run)
    prompt = TRUNK + first.output + TAIL
    second = run.submit(prompt, 4)
    run.finish()
    third = run.submit(prompt + second.output + OTHER * 12, 4)  # more than the room that is left in the caches
    run.finish()

    assert counts == []
    assert second.timings.cached_tokens == len(TRUNK) - 1
    assert third.timings.cached_tokens == len(prompt) - 1
    for row in (second, third):
        assert row.output == answers(adapter, [row.prompt], 4, dataclasses.replace(SMALL, chunk_tokens=64))[0]


def test_of_two_that_go_on_from_one_place_one_has_the_caches_and_the_other_a_copy(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    run.submit(TRUNK, 2)
    run.finish()
    counts = restored(run)
    rows = [run.submit(TRUNK + tail, 4) for tail in (TAIL, OTHER)]
    run.finish()

    assert counts == [len(TRUNK) - 1]
    assert [row.output for row in rows] == answers(adapter, [row.prompt for row in rows], 4)


def test_spare_caches_have_their_share_of_the_bytes_and_go_when_all_is_forgotten(adapter: Adapter) -> None:
    prompts = random_prompts(128, [60] * 6, seed=8)
    one = Run(adapter, LOOSE)
    one.submit(prompts[0], 2)
    one.finish()
    prefix = one.engine.prefix
    assert isinstance(prefix, PrefixSharing)
    size = prefix.retained.held_bytes
    assert size > 0
    assert prefix.held_bytes == prefix.tree.held_bytes + size
    prefix.answer(AskPrefixes(0, clear=True), 0)
    assert prefix.held_bytes == 0

    run = Run(adapter, dataclasses.replace(LOOSE, cache_bytes=8 * 3 * size))
    most = 0
    for prompt in prompts:
        run.submit(prompt, 2)
        run.finish()
        most = max(most, run.engine.prefix.held_bytes)
        assert run.engine.prefix.retained.held_bytes <= 3 * size  # type: ignore[attr-defined]
    assert most <= 8 * 3 * size
    assert run.engine.prefix.retained.held_bytes == 3 * size  # type: ignore[attr-defined]


def test_nobody_goes_on_with_the_caches_of_what_was_thrown_out(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    first = run.submit(TRUNK, 2)
    run.finish()
    counts = restored(run)
    run.engine.prefix.invalidate(first)
    second = run.submit(TRUNK + TAIL, 4)
    run.turn()
    assert run.engine.prefix.retained.held_bytes == 0
    run.finish()

    assert second.timings.cached_tokens == 0
    assert counts == [0]
    assert second.output == answers(adapter, [TRUNK + TAIL], 4)[0]


def test_of_an_answer_that_can_not_go_on_from_what_is_there_the_others_to_the_same_prompt_do(adapter: Adapter) -> None:
    run = Run(adapter, LOOSE)
    run.submit(TRUNK, 2)
    run.finish()
    run.engine.faults.rules = [Rule("restore", TRUNK[0], times=1)]
    first, second = run.engine.submit_all(
        Submit((90, 91), TRUNK, (Sampling(temperature=0.0, max_tokens=4, ignore_eos=True),) * 2)
    )
    run.finish()

    assert first.finish == "error"
    assert second.output == answers(adapter, [TRUNK], 4)[0]
