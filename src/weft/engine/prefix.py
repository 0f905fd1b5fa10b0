"""Prefix caching for sequences: matches prompts with the prefix tree, adds computed chunks, pins and unpins nodes.

Of several prompts that need the same chunk one computes it and the others continue from it; the scheduler decides which.
"""

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from weft.engine.runner import Runner
from weft.engine.scheduler import TAIL_TOKENS, Row, tail_end
from weft.engine.sequence import Sequence
from weft.errors import WeftError
from weft.ipc.messages import AskPrefixes, Prefixes, PrefixNode, PrefixReuse
from weft.memory.disk import DiskTier
from weft.memory.disk_files import Entry, Packed
from weft.memory.prefix_tree import MIN_SHARED, Node, PrefixTree, key_of
from weft.model.saved_state import LayerCaches, SavedState, pack

log = logging.getLogger("weft.engine")

COPY_BYTES_PER_SECOND = 1e9  # cost of restoring states; measured 0.9 (smollm2) and 2.4 (tiny-hybrid) on two busy CPU cores
RETAINED_SHARE = 8  # one in so many of the bytes for cached prefixes goes to retained caches
MAX_NODES_SENT = 2000
MIN_SHARED_AT_TAIL = 4  # tokens; fewer than MIN_SHARED are left there, and prompts that arrive together differ behind them

ChunkEnds = Callable[[Sequence], Iterator[int]]


class PrefixSharing:
    """Computes prefixes that prompts have in common only once; without a tree every prompt is computed from its start."""

    def __init__(self, tree: PrefixTree | None, runner: Runner, chunk_ends: ChunkEnds, disk: DiskTier | None = None) -> None:
        self.tree = tree
        self.runner = runner
        self.chunk_ends = chunk_ends
        self.disk = disk
        self.retained = RetainedCaches()
        self._loads: dict[int, Future[list[Entry]]] = {}  # by the id of the sequence that waits

    @property
    def held_bytes(self) -> int:
        return 0 if self.tree is None else self.tree.held_bytes + self.retained.held_bytes

    def limit(self, budget_bytes: int) -> None:
        """Set the prefix cache's budget and evict what exceeds it; retained KV caches may use an eighth of it."""
        if self.tree is not None:
            self.retained.limit(budget_bytes)
            self.tree.limit(budget_bytes - self.retained.held_bytes)

    def answer(self, request: AskPrefixes, budget_bytes: int) -> Prefixes:
        """List the cached prefixes; `request.clear` first drops unpinned tree nodes, all retained caches and the disk cache."""
        tree, disk, num_cleared = self.tree, self.disk, 0
        if tree is None:
            return Prefixes(request.number, (), 0, 0, 0)
        if request.clear:
            self.retained.limit(0)
            if disk is not None:
                disk.clear()
            num_cleared = tree.clear()
        if request.scope is not None:
            own = tree.nodes_of(request.scope)
            # What a scope is shown must not depend on others: its nodes are numbered by themselves.
            numbers = {node: at for at, node in enumerate(sorted(own, key=_number), 1)}
            return Prefixes(request.number, self._listed(own, numbers), len(own), sum(map(_nbytes, own)), budget_bytes)
        nodes = list(itertools.islice(tree.nodes(), MAX_NODES_SENT))
        sizes = (len(tree), self.held_bytes, budget_bytes, disk.held_bytes if disk is not None else 0)
        return Prefixes(request.number, self._listed(nodes, {node: node.number for node in nodes}), *sizes, num_cleared)

    def _listed(self, nodes: list[Node], numbers: dict[Node, int]) -> tuple[PrefixNode, ...]:
        assert self.tree is not None
        disk, now, salted = self.disk, self.tree.clock(), {root for (_, salt), root in self.tree.roots.items() if salt}
        return tuple(
            PrefixNode(
                number=numbers[node],
                parent=None if node.parent is None else numbers.get(node.parent),
                length=node.length,
                tokens=node.tokens,
                nbytes=node.nbytes,
                has_checkpoint=node.checkpoint is not None,
                pins=node.pins,
                hits=node.hits,
                idle_seconds=now - node.used_at,
                is_salted=node.path()[0].parent in salted,
                is_on_disk=disk is not None and disk.has(node.key),
            )
            for node in nodes[:MAX_NODES_SENT]
        )

    def update(self, sequence: Sequence) -> None:
        """Skip the part of a prompt that is cached now, or start loading it from disk; prepare a fully cached one to decode."""
        if self.tree is not None:
            self._match(sequence, self.tree)
        if sequence.is_prefilled:
            self.begin(sequence)

    def best_cut(self, sequence: Sequence, end: int, others: list[Sequence]) -> int | None:
        """Return where to end a prompt's next chunk before `end` because other prompts diverge there; None for no such cut."""
        node = sequence.prefix.node
        if self.tree is None or node is None or sequence.prefix.is_private:
            return None
        is_at_tail = node.length == tail_end(len(sequence.prefill_ids))
        least = MIN_SHARED_AT_TAIL if is_at_tail else MIN_SHARED
        return self.tree.best_cut(node, sequence.prefill_ids, end, [other.prefill_ids for other in others], least)

    def begin(self, sequence: Sequence) -> None:
        """Give a sequence without KV caches the retained ones at its prefix node, if any; record why no more was cached."""
        node, timings = sequence.prefix.node, sequence.timings
        if node is not None and not sequence.has_caches and (caches := self.retained.take(node)) is not None:
            self.runner.adopt(sequence, caches)
        if timings.reuse is not None:
            return
        if self.tree is None:
            timings.reuse = PrefixReuse("off")
        elif sequence.must_read_prompt:
            timings.reuse = PrefixReuse("logprobs")
        elif sequence.is_prefilled:
            timings.reuse = PrefixReuse("whole", sequence.num_computed)
        elif node is not None:
            end = next(self.chunk_ends(sequence))
            salt, scope = sequence.request.salt, sequence.request.scope
            timings.reuse = self.tree.explain_miss(node, sequence.prefill_ids, end, salt, scope)

    def enter(self, row: Row) -> None:
        """Add a computed prompt chunk to the prefix tree and pin it; if it does not fit, the sequence stops sharing chunks."""
        sequence, cursor = row.sequence, row.sequence.prefix
        if self.tree is None or cursor.node is None or cursor.is_private:
            return
        if row.count == 1:  # a prompt of two tokens: no other prompt computes its first one alone
            cursor.is_private = True
            return
        tokens = tuple(sequence.prefill_ids[row.start : row.start + row.count])
        saved = self.runner.save(row) if self.tree.has_room(self.runner.saved_bytes(row)) else None
        if saved is None or not self.tree.has_room(sum(state.nbytes for state in saved)):
            cursor.is_private = True  # from here on it computes for itself alone
            return
        block, checkpoint = saved
        node = self.tree.enter(cursor.node, tokens, block, checkpoint, is_retained=sequence.request.is_retained)
        self._keep_checkpoints(sequence, cursor.node, node, self.tree)
        if cursor.first_own_node is None or cursor.first_own_node.is_detached:
            cursor.first_own_node = node
        self._pin(sequence, node)
        if sequence.is_prefilled:
            self._store(node)

    @staticmethod
    def _keep_checkpoints(sequence: Sequence, parent: Node, node: Node, tree: PrefixTree) -> None:
        """Mark those nodes of a prompt from which others go on: boundaries, its end, and the last one before its last words.

        A conversation has the last of these only once: its next turn goes on from a boundary or the end.
        """
        tail = tail_end(len(sequence.prefill_ids))
        node.keep = node.keep or node.length in sequence.boundaries
        parent.is_tail = parent.is_tail or parent.length <= tail < node.length
        if sequence.is_prefilled:  # the next turn goes on from here, or diverges within the last chunk
            node.keep = parent.keep = True
            tree.forget_tails(one for one in node.path() if one.length < tail - TAIL_TOKENS)

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Start a fork (further answer) from its leader's computed prompt: pin the leader's prefix node, or copy its states."""
        if self.tree is None or leader.prefix.is_private or leader.prefix.node is None:
            self.runner.fork(leader, fork)
            fork.prefix.is_private = True
            return
        self._pin(fork, leader.prefix.node)
        fork.timings.cached_tokens = fork.num_computed
        fork.timings.reuse = PrefixReuse("whole", fork.num_computed)

    def release_allocated(self, sequence: Sequence) -> None:
        """Unpin the prefix of a row that has its states in the pool; keep its prefill caches for the conversation's next turn."""
        if sequence.is_prefilled:
            self._release_prompt(sequence)
        self.retain(sequence)

    def retain(self, sequence: Sequence) -> None:
        """Keep the caches a row was prefilled in for the conversation's next turn, once its own steps do without them."""
        retained, cursor = self.runner.take_retained(sequence), sequence.prefix
        node = cursor.prompt_node
        if retained is not None and node is not None and not cursor.is_private and node.length == retained[1]:
            self.retained.keep(node, retained[0], self.runner.adapter.bytes_of(retained[0]))

    def release(self, sequence: Sequence) -> None:
        """Unpin a sequence's prefix and drop its pending disk load; chunks of an unfinished prompt are queued to disk."""
        sequence.prefix.is_loading = False
        self._loads.pop(sequence.id, None)
        if sequence.is_prefilled:
            self._release_prompt(sequence)
        elif sequence.prefix.node is not None:
            self._store(sequence.prefix.node)
            self._unpin(sequence)

    def _release_prompt(self, sequence: Sequence) -> None:
        """Unpin the node at which a sequence's prompt ends, and remember it for the caches that the row was prefilled in."""
        cursor = sequence.prefix
        if cursor.node is not None:
            cursor.prompt_node = cursor.node
            self._unpin(sequence)

    def reset(self, sequence: Sequence) -> None:
        """Reset a failed sequence's progress to its pinned prefix node, because its own states beyond that node are lost."""
        sequence.num_computed = 0 if sequence.prefix.node is None else sequence.prefix.node.length
        sequence.prefix.is_private = False

    def invalidate(self, sequence: Sequence) -> None:
        """Remove the chunks that a failed sequence computed, and all their descendants, from tree and disk."""
        if sequence.prefix.first_own_node is not None:
            self.invalidate_subtree(sequence.prefix.first_own_node)

    def invalidate_subtree(self, node: Node) -> int:
        """Remove a node and all its descendants from memory and disk; returns the number of chunks removed from memory."""
        assert self.tree is not None
        if self.disk is not None:
            self.disk.forget([key for one in node.subtree() for key in (one.key, *one.former_keys)])
        return self.tree.invalidate(node)

    def _match(self, sequence: Sequence, tree: PrefixTree) -> None:
        cursor = sequence.prefix
        if cursor.node is None:
            self._pin(sequence, tree.root(sequence.request.salt, sequence.request.scope))
        assert cursor.node is not None
        if sequence.must_read_prompt or cursor.is_private or sequence.is_amid_chunk:
            return
        self._take_loaded(sequence, tree)
        if cursor.is_loading:
            return
        if cursor.looked_up == (cursor.node, tree.num_entered):
            return
        found = tree.match(sequence.prefill_ids, cursor.node, self.chunk_ends(sequence))
        if found is not cursor.node and self._is_worth_restoring(sequence, found):
            if sequence.timings.first_token is None:  # later it is a restart, and the count was reported
                sequence.timings.cached_tokens += found.length - cursor.node.length
            self._pin(sequence, found)
            tree.hit(found)
            sequence.memory = None  # its own caches; they are restored when they are needed
        cursor.looked_up = cursor.node, tree.num_entered
        if self.disk is not None and not cursor.has_asked_disk:  # once per prompt; it waits for what is not in memory
            cursor.has_asked_disk = True
            if keys := self._keys_on_disk(sequence, cursor.node, self.disk):
                cursor.is_loading = True
                self._loads[sequence.id] = self.disk.load(keys)

    def _is_worth_restoring(self, sequence: Sequence, found: Node) -> bool:
        """Whether restoring the states at `found` is faster than computing up to there; True for a sequence without caches."""
        if not sequence.has_caches:
            return True
        seconds = (found.length - sequence.num_computed) * self.runner.prefill_rate.seconds_per_token
        return seconds > sum(node.nbytes for node in found.path()) / COPY_BYTES_PER_SECOND

    def _pin(self, sequence: Sequence, node: Node) -> None:
        assert self.tree is not None
        self.tree.pin(node)
        self._unpin(sequence)
        sequence.prefix.node, sequence.num_computed = node, node.length

    def _unpin(self, sequence: Sequence) -> None:
        node, sequence.prefix.node = sequence.prefix.node, None
        if node is not None and self.tree is not None:
            self.tree.unpin(node)

    def _keys_on_disk(self, sequence: Sequence, node: Node, disk: DiskTier) -> list[bytes]:
        """Return the keys of a prompt's chunks on disk after `node`, up to the last one with a checkpoint; empty if none."""
        assert self.tree is not None
        tokens, ends = sequence.prefill_ids, {*self.chunk_ends(sequence)} if self.tree.own_cuts else None
        found: list[bytes] = []
        open_paths: list[tuple[int, bytes, list[bytes]]] = [(node.length, node.key, [])]
        furthest = 0
        while open_paths:
            length, key, path = open_paths.pop()
            if path and length > furthest and disk.has_checkpoint(key):
                furthest, found = length, path
            for end in (length + size for size in disk.sizes_after(key)):
                if end < len(tokens) and end != len(tokens) - 2 and (ends is None or end in ends):  # no token is computed alone
                    after = key_of(key, tokens[length:end])
                    if disk.has(after):
                        open_paths.append((end, after, [*path, after]))
        return found

    def _take_loaded(self, sequence: Sequence, tree: PrefixTree) -> None:
        """Add the chunks that a sequence's finished disk load returned to the prefix tree; does nothing while it is pending."""
        load, node = self._loads.get(sequence.id), sequence.prefix.node
        if load is None or node is None or not load.done():
            return
        del self._loads[sequence.id]
        sequence.prefix.is_loading = False
        try:
            found = [(loaded, *self.runner.unpacked(loaded)) for loaded in load.result()]
        except WeftError as error:
            log.warning("a prefix on disk does not fit this model and is computed again: %s", error)
            return
        for loaded, block, checkpoint in found:
            node = tree.enter(node, loaded.tokens, block, checkpoint, is_retained=sequence.request.is_retained)
            node.keep = node.keep or checkpoint is not None

    def _store(self, leaf: Node) -> None:
        if self.disk is None:
            return
        for node in leaf.path():
            checkpoint = node.checkpoint if node.is_worth_a_checkpoint else None
            if not self.disk.has(node.key) or (checkpoint is not None and not self.disk.has_checkpoint(node.key)):
                assert node.parent is not None
                packed = _packed(node.block), None if checkpoint is None else _packed(checkpoint)
                self.disk.store(Entry(node.key, node.parent.key, node.tokens, *packed))


def _number(node: Node) -> int:
    return node.number


def _nbytes(node: Node) -> int:
    return node.nbytes


def _packed(saved: object) -> Packed:
    assert isinstance(saved, SavedState)
    return pack(saved)


class RetainedCaches:
    """Keeps KV caches of finished rows by prefix node, so the next turn of a conversation continues in them without a copy.

    An entry belongs to the node at which its prompt ended and is used once. Bounded in bytes; the oldest are dropped first.
    """

    def __init__(self) -> None:
        self.share = RETAINED_SHARE
        self.max_bytes = 0
        self.held_bytes = 0
        self._kept: OrderedDict[Node, tuple[LayerCaches, int]] = OrderedDict()

    def keep(self, node: Node, caches: LayerCaches, num_bytes: int) -> None:
        self.take(node)
        self._kept[node] = caches, num_bytes
        self.held_bytes += num_bytes
        self._shrink()

    def take(self, node: Node) -> LayerCaches | None:
        caches, num_bytes = self._kept.pop(node, (None, 0))
        self.held_bytes -= num_bytes
        return caches

    def limit(self, budget_bytes: int) -> None:
        self.max_bytes = budget_bytes // self.share
        self._shrink()

    def _shrink(self) -> None:
        for node in [node for node in self._kept if node.is_detached]:
            self.take(node)
        while self.held_bytes > self.max_bytes:
            self.take(next(iter(self._kept)))
