"""Who stands on what was computed before: prompts find their place in the prefix tree, enter what they compute, and step off.

Of prompts that need the same chunk one computes it and the others go on from there. `NoPrefixSharing` keeps nothing: the
reference, and the off-switch. Used by the engine alone; what is in the nodes is the runner's.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future

from weft.engine.plan import Row
from weft.engine.retained import RetainedCaches
from weft.engine.runner import Runner
from weft.engine.scheduler import Scheduler
from weft.engine.sequence import Sequence
from weft.errors import WeftError
from weft.ipc.messages import PrefixReuse
from weft.memory.disk import DiskTier, Loaded
from weft.memory.prefix_tree import Node, PrefixTree, key_of

log = logging.getLogger("weft.engine")

COPY_BYTES_PER_SECOND = 1e9  # what restoring states costs; measured 0.9 (smollm2) and 2.4 (tiny-hybrid) on two busy CPU cores


class NoPrefixSharing:
    """Every prompt is computed from its first token."""

    tree: PrefixTree | None = None
    disk: DiskTier | None = None

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.failures: list[tuple[Sequence, Exception]] = []  # since they were last taken

    def take_failures(self) -> list[tuple[Sequence, Exception]]:
        """Sequences that could not be helped, and why."""
        failures, self.failures = self.failures, []
        return failures

    def share(self) -> list[Sequence]:
        """Let prompts stand on what is there by now; gives those that are in memory without another chunk of theirs."""
        return []

    def begin(self, sequence: Sequence) -> None:
        """A prompt is about to be worked on: note what it did not have to compute, and why no more."""
        if sequence.reuse is None:
            sequence.reuse = PrefixReuse("off")

    def enter(self, row: Row) -> None:
        """A chunk was computed: others may stand on it from now on."""

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Give a sequence the states of another whose prompt is in memory."""
        self.runner.fork(leader, fork)

    def allocated(self, sequence: Sequence) -> None:
        """A sequence has all its states in memory of its own."""
        self.runner.take_retained(sequence)

    def limit(self, budget_bytes: int) -> None:
        """Have no more bytes than this."""

    def clear(self) -> int:
        """Forget everything that nobody stands on; how many chunks that were."""
        return 0

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept for prompts to come."""
        return 0

    def reset_to_prefix(self, sequence: Sequence) -> None:
        """Its own states are gone: whoever goes on with its prompt begins at what it stands on."""
        sequence.num_computed = sequence.prefix_node.length if sequence.prefix_node is not None else 0
        sequence.is_shared = True

    def leave(self, sequence: Sequence) -> None:
        """A sequence needs its place no more."""

    def invalidate(self, sequence: Sequence) -> int:  # noqa: ARG002
        """What a sequence computed is wrong: nobody may stand on it. How many chunks that were."""
        return 0

    @property
    def is_loading(self) -> bool:
        """Whether nothing can be done before something has come from disk."""
        return False


class PrefixSharing(NoPrefixSharing):
    """Prompts that begin alike are computed once."""

    tree: PrefixTree

    def __init__(self, tree: PrefixTree, scheduler: Scheduler, runner: Runner, disk: DiskTier | None = None) -> None:
        super().__init__(scheduler, runner)
        self.tree = tree
        self.disk = disk
        self.retained = RetainedCaches()
        self._loads: dict[int, Future[list[Loaded]]] = {}  # by the number of the sequence that asked

    @property
    def held_bytes(self) -> int:
        """Bytes that are kept for prompts to come."""
        return self.tree.held_bytes + self.retained.held_bytes

    def share(self) -> list[Sequence]:
        """Match every prompt that has no chunk under way, then let the one go first whose chunk others need too."""
        for sequence in self.scheduler.prompts:
            try:
                self._match(sequence)
            except Exception as error:  # a border: whatever is wrong with what it stands on is its own affair
                self.failures.append((sequence, error))
        done = self.scheduler.drop_prefilled()
        for sequence in done:
            try:
                self.begin(sequence)
            except Exception as error:  # a border: the same
                self.failures.append((sequence, error))
        self._choose_first()
        return done

    def _choose_first(self) -> None:
        """The turn is the first's; but who has states in memory computes a common chunk, and who waits for a disk does not."""
        prompts = self.scheduler.prompts
        first = next((one for one in prompts if not one.is_loading), None)
        if first is None:
            return
        if not self.runner.has_caches(first):
            wanted = self._next_chunk(first)
            first = next((one for one in prompts if self.runner.has_caches(one) and self._next_chunk(one) == wanted), first)
        self._cut(first)
        self._note_followers(first)
        if first is not prompts[0]:
            self.scheduler.put_first(first)

    def _note_followers(self, first: Sequence) -> None:
        """Say of every prompt whether it waits for the chunk that the first one computes."""
        start, end = first.num_computed, next(self.scheduler.chunk_ends(first))
        wanted = first.prefill_ids[start:end]
        for one in self.scheduler.prompts:
            is_beside = one is not first and one.prefix_node is first.prefix_node and one.sampling.prompt_logprobs is None
            one.is_following = is_beside and first.is_shared and one.prefill_ids[start:end] == wanted

    def _cut(self, sequence: Sequence) -> None:
        """End its next chunk where others part from it, once in a chunk: what they share is computed once."""
        prefix_node = sequence.prefix_node
        is_ready = sequence.is_shared and not sequence.is_prefilled and not self.runner.is_amid_chunk(sequence)
        if prefix_node is None or prefix_node.length == sequence.cut_at or not is_ready:
            return
        end = next(self.scheduler.chunk_ends(sequence))
        others = [one.prefill_ids for one in self.scheduler.prompts if one is not sequence and one.prefix_node is prefix_node]
        place = self.tree.best_cut(prefix_node, sequence.prefill_ids, end, others)
        if place is not None:
            sequence.cut_at = place
            sequence.boundaries = tuple(sorted((*sequence.boundaries, place)))

    def _match(self, sequence: Sequence) -> None:
        if sequence.prefix_node is None:
            self._pin(sequence, self.tree.root(sequence.salt))
        if sequence.sampling.prompt_logprobs is not None or not sequence.is_shared or self.runner.is_amid_chunk(sequence):
            return  # it must read every token itself, or goes its own way, or has begun one
        self._take_loaded(sequence)
        if sequence.is_loading:
            return
        found = self.tree.match(sequence.prefill_ids, sequence.prefix_node, self.scheduler.chunk_ends(sequence))
        if found is not sequence.prefix_node and self._is_worth_it(sequence, found):
            if sequence.timings.first_token is None:  # else it has told what it did not compute
                sequence.num_cached += found.length - sequence.prefix_node.length
            self._pin(sequence, found)
            self.tree.hit(found)
            self.runner.forget(sequence)
        self._ask_disk(sequence)

    def _is_worth_it(self, sequence: Sequence, found: Node) -> bool:
        """Whether going on from `found` is cheaper than computing up to there, for one that has its states in memory."""
        if not self.runner.has_caches(sequence):
            return True
        seconds = (found.length - sequence.num_computed) * self.runner.seconds_per_token
        return seconds > sum(node.nbytes for node in found.path()) / COPY_BYTES_PER_SECOND

    def begin(self, sequence: Sequence) -> None:
        """Say why no more of it was there. The caches of a row that ended where it stands are the best to go on from."""
        can_adopt = sequence.prefix_node is not None and not self.runner.has_caches(sequence)
        if can_adopt and (caches := self.retained.take(sequence.prefix_node)) is not None:
            self.runner.adopt(sequence, caches)
        if sequence.reuse is not None or sequence.prefix_node is None:
            return
        if sequence.sampling.prompt_logprobs is not None:
            sequence.reuse = PrefixReuse("logprobs")
        elif sequence.is_prefilled:
            sequence.reuse = PrefixReuse("whole", sequence.num_computed)
        else:
            end = next(self.scheduler.chunk_ends(sequence))
            sequence.reuse = self.tree.reuse(sequence.prefix_node, sequence.prefill_ids, end, sequence.salt)

    def enter(self, row: Row) -> None:
        """Keep a chunk, and stand on it."""
        sequence = row.sequence
        if not sequence.is_shared:
            return
        tokens = tuple(sequence.prefill_ids[row.start : row.start + row.count])
        block, checkpoint = self.runner.save(row)
        if not self.tree.has_room(block.nbytes + checkpoint.nbytes):
            sequence.is_shared = False  # from here on it is alone with what it computes
            return
        node = self.tree.enter(sequence.prefix_node, tokens, block, checkpoint, is_retained=sequence.is_retained)
        node.keep = node.keep or node.length in sequence.boundaries
        if sequence.is_prefilled:  # what comes next goes on from here, or parts from it within the last chunk
            node.keep = node.parent.keep = True  # type: ignore[union-attr]
        sequence.first_own_node = sequence.first_own_node or node
        self._pin(sequence, node)
        if sequence.is_prefilled:
            self._store(node)

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Both stand on the same node, if it was kept."""
        if not leader.is_shared:
            super().fork(leader, fork)
            fork.is_shared = False
            return
        self._pin(fork, leader.prefix_node)
        fork.num_cached = fork.num_computed
        fork.reuse = PrefixReuse("whole", fork.num_computed)

    def allocated(self, sequence: Sequence) -> None:
        """Its states are in memory of its own: what it stood on may go, and the caches it began with are spare."""
        retained = self.runner.take_retained(sequence)
        if sequence.is_prefilled and self.runner.has_states(sequence):
            if (
                retained is not None
                and sequence.is_shared
                and sequence.prefix_node is not None
                and sequence.prefix_node.length == retained[1]
            ):
                self.retained.keep(sequence.prefix_node, retained[0], self.runner.adapter.bytes_of(retained[0]))
            self._unpin(sequence)

    def clear(self) -> int:
        """Forget everything that nobody stands on; how many chunks that were."""
        self.retained.limit(0)
        return self.tree.clear()

    def limit(self, budget_bytes: int) -> None:
        """Spares have their share of it, the tree the rest."""
        self.retained.limit(budget_bytes)
        self.tree.limit(budget_bytes - self.retained.held_bytes)

    def leave(self, sequence: Sequence) -> None:
        """Step off; a chunk under way goes to somebody who needs the same."""
        sequence.is_loading = False
        self._loads.pop(sequence.id, None)
        if sequence.prefix_node is None:
            return
        if not sequence.is_prefilled:
            self._hand_over(sequence)
            self._store(sequence.prefix_node)
        self._unpin(sequence)

    def _hand_over(self, sequence: Sequence) -> None:
        if not self.runner.is_amid_chunk(sequence):
            return
        wanted = self._next_chunk(sequence)
        for other in self.scheduler.prompts:
            if self._can_take_over(other) and self._next_chunk(other) == wanted:
                self.runner.hand_over(sequence, other)
                return

    def _can_take_over(self, other: Sequence) -> bool:
        is_free = other.prefix_node is not None and not other.is_finished and not other.is_loading
        return is_free and other.sampling.prompt_logprobs is None and not self.runner.is_amid_chunk(other)

    def invalidate(self, sequence: Sequence) -> int:
        """Throw out its first own chunk and all behind it."""
        return 0 if sequence.first_own_node is None else self.invalidate_subtree(sequence.first_own_node)

    def invalidate_subtree(self, node: Node) -> int:
        """Nobody may stand on a node or anything behind it any more, now or after a restart. How many that were."""
        if self.disk is not None:
            self.disk.forget([one.key for one in node.subtree()])
        return self.tree.invalidate(node)

    def _next_chunk(self, sequence: Sequence) -> tuple[int, tuple[int, ...]]:
        """What it needs next: where it stands, and the tokens."""
        end = next(self.scheduler.chunk_ends(sequence))
        place = sequence.prefix_node if sequence.is_shared else sequence
        return id(place), tuple(sequence.prefill_ids[sequence.num_computed : end])

    def _pin(self, sequence: Sequence, node: Node) -> None:
        self.tree.pin(node)
        self._unpin(sequence)
        sequence.prefix_node, sequence.num_computed = node, node.length

    def _unpin(self, sequence: Sequence) -> None:
        if sequence.prefix_node is not None:
            prefix_node, sequence.prefix_node = sequence.prefix_node, None
            self.tree.unpin(prefix_node)

    @property
    def is_loading(self) -> bool:
        """Whether all that is left to do waits for the disk."""
        running = self.scheduler.running
        return bool(running) and all(sequence.is_loading for sequence in running)

    def _ask_disk(self, sequence: Sequence) -> None:
        """Once for each prompt: what of it is on disk, and not in memory? It waits until that has come."""
        if self.disk is None or sequence.has_asked_disk:
            return
        sequence.has_asked_disk = True
        if keys := self._on_disk(sequence, self.disk):
            sequence.is_loading = True
            self._loads[sequence.id] = self.disk.load(keys)

    def _on_disk(self, sequence: Sequence, disk: DiskTier) -> list[bytes]:
        """The names of what follows on disk, up to the last place at which every layer can be restored."""
        ends = {*self.scheduler.chunk_ends(sequence)} if self.tree.is_exact else None
        found: list[bytes] = []
        waiting: list[tuple[int, bytes, list[bytes]]] = [(sequence.prefix_node.length, sequence.prefix_node.key, [])]
        furthest = 0
        while waiting:
            length, key, path = waiting.pop()
            if path and length > furthest and disk.has_checkpoint(key):
                furthest, found = length, path
            for end in (length + size for size in disk.sizes_after(key)):
                if end < len(sequence.prefill_ids) and (ends is None or end in ends):
                    after = key_of(key, sequence.prefill_ids[length:end])
                    if disk.has(after):
                        waiting.append((end, after, [*path, after]))
        return found

    def _take_loaded(self, sequence: Sequence) -> None:
        """What has come from disk is entered as if it had been computed."""
        load = self._loads.get(sequence.id)
        if load is None or not load.done():
            return
        del self._loads[sequence.id]
        sequence.is_loading = False
        node: Node = sequence.prefix_node
        try:
            found = [(loaded, *self.runner.unpacked(loaded)) for loaded in load.result()]
        except WeftError as error:
            log.warning("what was kept on disk does not fit this model and is computed again: %s", error)
            return
        for loaded, block, checkpoint in found:
            node = self.tree.enter(node, loaded.tokens, block, checkpoint, is_retained=sequence.is_retained)
            node.keep = node.keep or checkpoint is not None

    def _store(self, prefix_node: Node) -> None:
        """Write down what is not on disk yet; returns at once."""
        if self.disk is None:
            return
        for node in prefix_node.path():
            checkpoint = node.checkpoint if node.is_worth_a_checkpoint else None
            if not self.disk.has(node.key) or (checkpoint is not None and not self.disk.has_checkpoint(node.key)):
                assert node.parent is not None
                self.disk.store(node.key, node.parent.key, node.tokens, *self.runner.packed(node.block, checkpoint))  # type: ignore[arg-type]
