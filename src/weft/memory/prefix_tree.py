"""The prefix cache in memory: a tree of prompt chunks, each with its keys and values, some with the states of other layers.

A child is found by its chunk's tokens, so a path is both the tokens and the places where they were cut. A tree takes the tokens
however they were cut and lets prompts be cut where they diverge, or, where all layers are attention over all tokens, splits
known chunks there. With `own_cuts` it follows only a prompt's own cuts, for models whose numbers depend on them.
Knows tokens and bytes; blocks and checkpoints are opaque.
"""

import hashlib
import itertools
import time
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, Self

from weft.ipc.messages import PrefixReuse

LATTICE = 4  # every so many chunks a checkpoint is kept, whatever comes
PROTECTED_SHARE = 0.5  # of the budget is for prompts that were used again; the rest is for new ones
MAX_EVICTED_KEYS = 20_000  # evicted nodes whose keys are remembered, so that a later miss can be explained
MAX_LOOKED_AT = 256  # children of one node that are compared with a prompt that missed
MIN_SHARED = 16  # tokens; prompts that share fewer of a chunk are not cut where they diverge

Tokens = tuple[int, ...]


class Stored(Protocol):
    """Protocol of the opaque data in a node, a KV block or a checkpoint: its size in bytes is known, and a block can be split."""

    @property
    def nbytes(self) -> int: ...

    def split(self, count: int) -> tuple[Self, Self]: ...


class Node:
    """A prefix-tree node: one cached prompt chunk; `length` counts the tokens from the prompt's start to the chunk's end."""

    def __init__(self, number: int, parent: Self | None, tokens: Tokens, key: bytes, block: Stored | None = None) -> None:
        self.number = number
        self.parent = parent
        self.tokens = tokens
        self.key = key  # of the whole path, with its salt
        self.length: int = (parent.length if parent is not None else 0) + len(tokens)
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.block = block
        self.checkpoint: Stored | None = None  # the states of all layers without keys and values, at its end; None: dropped
        self.children: dict[Tokens, Self] = {}
        self.sizes: Counter[int] = Counter()  # of the children's chunks
        self.pins = 0  # sequences whose prefix ends here
        self.hits = 0  # sequences that went on from it or from behind it
        self.used_at = 0.0
        self.keep = False  # its checkpoint is worth its bytes: a prompt ended here, or two diverged
        self.is_tail = False  # so is this one's: a prompt ended soon behind it, and others may have other last words
        self.is_protected = False  # one-off prompts do not push it out
        self.is_detached: bool = parent is not None and parent.is_detached  # it was evicted or invalidated while in use
        self.is_rest = False  # its chunk was split, and its parent is the first part
        self.former_keys: list[bytes] = []  # before chunks were split

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in (self.block, self.checkpoint) if stored is not None)

    @property
    def is_worth_a_checkpoint(self) -> bool:
        """Whether to keep a checkpoint: it has 0 bytes, it is marked, or the node is a leaf, a fork or at a depth of 4 · n."""
        is_free = self.checkpoint is not None and not self.checkpoint.nbytes
        return is_free or self.keep or self.is_tail or len(self.children) != 1 or self.depth % LATTICE == 0

    def path(self) -> list[Self]:
        """Return the nodes from the first chunk to this node, without the root."""
        nodes, node = list[Self](), self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def subtree(self) -> Iterator[Self]:
        """Yield this node and all its descendants, parents before children."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


class PrefixTree:
    """The tree of cached prompt chunks: bounded in bytes, evicts in segmented LRU order, never evicts pinned nodes.

    Nodes are in one of two LRU lists: new nodes, and protected nodes, which were used again or whose client will come again
    (`is_retained`). A use counts for the whole path, so the oldest of a list has no children in it. New nodes are evicted
    first. Protected nodes have half the budget: those beyond it become new again, so no node stays for ever.
    """

    def __init__(
        self,
        budget_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        own_cuts: bool = False,
        can_split: bool = False,
    ) -> None:
        self.budget_bytes = budget_bytes
        self.clock = clock
        self.own_cuts = own_cuts
        self.can_split = can_split and not own_cuts
        self.num_entered = 0  # chunks and checkpoints so far: as long as it stays, a prompt that found nothing finds nothing
        self.held_bytes = 0
        self.num_evicted = 0
        self.on_change: Callable[[Node, bytes], None] = lambda _node, _key: None  # a node came, went, or its checkpoint did
        self.roots: dict[tuple[str, str], Node] = {}  # by scope and salt
        self._new: OrderedDict[Node, None] = OrderedDict()
        self._protected: OrderedDict[Node, None] = OrderedDict()
        self._protected_bytes = 0
        self._evicted_keys: OrderedDict[bytes, None] = OrderedDict()
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._new) + len(self._protected)

    def root(self, salt: str = "", scope: str = "") -> Node:
        """Return the node at which all prompts under this salt and in this scope begin; others share nothing with them."""
        if (scope, salt) not in self.roots:
            self.roots[scope, salt] = Node(0, None, (), root_key(salt, scope))
        return self.roots[scope, salt]

    def nodes(self) -> Iterator[Node]:
        """Iterate over all nodes but the roots, most recently used first, parents before children."""
        return iter(sorted((*self._new, *self._protected), key=_recency))

    def nodes_of(self, scope: str) -> list[Node]:
        """Return all nodes of one scope but its roots, most recently used first, parents before children."""
        roots = [root for (whose, _), root in self.roots.items() if whose == scope]
        return sorted((node for root in roots for node in root.subtree() if node is not root), key=_recency)

    def match(self, prompt: Sequence[int], start: Node, ends: Iterator[int]) -> Node:
        """Return the deepest node with a checkpoint on the prompt's cached path from `start`, or `start` if there is none.

        The last token is always computed, and none is computed alone before it. May split a chunk that the prompt shares in part.
        """
        found, waiting, last = start, [start], len(prompt) - 1
        split: tuple[int, Node] | None = None
        while waiting:
            node = waiting.pop()
            for size in [next(ends, node.length) - node.length] if self.own_cuts else node.sizes:
                child = node.children.get(tuple(prompt[node.length : node.length + size]))
                if child is not None and (child.length == last or child.length < last - 1):
                    waiting.append(child)
                    if child.checkpoint is not None and child.length > found.length:
                        found = child
            if self.can_split:
                for child in _recent(node):
                    end = min(node.length + _num_same(child.tokens, prompt, node.length), last)
                    split = (end, child) if split is None or end > split[0] else split
        if split is None or split[0] - found.length < MIN_SHARED or split[1].is_detached:
            return found
        end, child = split
        assert child.parent is not None
        return self._split(child, end - (end == last - 1) - child.parent.length)

    def best_cut(
        self, node: Node, prompt: Sequence[int], end: int, others: Iterable[Sequence[int]], least: int = MIN_SHARED
    ) -> int | None:
        """Return where to cut the chunk after `node` to share most tokens with known prompts and `others`; None for no cut.

        It shares `least` tokens with one of the others, or MIN_SHARED with a known prompt.
        """
        if self.own_cuts or self.can_split:
            return None
        known = [_num_same(child.tokens, prompt, node.length) for child in _recent(node)]
        beside = [_num_same(tuple(other[node.length : min(end, len(other) - 1)]), prompt, node.length) for other in others]
        size, shared = end - node.length, known + beside
        found = [count for count in known if count >= MIN_SHARED] + [count for count in beside if count >= least]
        places = {min(count, size - 2) for count in found if count < size} - {0, 1}  # no token is computed alone
        if not places:
            return None
        return node.length + max(places, key=lambda place: place * sum(count >= place for count in shared))

    def explain_miss(self, prefix_node: Node, prompt: Sequence[int], end: int, salt: str, scope: str = "") -> PrefixReuse:
        """Return a PrefixReuse: why a prompt is cached only up to `prefix_node`; `end` is where its next chunk would end."""
        root = self.root(salt, scope)
        if salt and not root.children:
            return PrefixReuse("salt")
        position, instead = self._longest_known(root, prompt)
        known = prompt[position] if position < len(prompt) else None
        chunk = tuple(prompt[prefix_node.length : end])
        if position >= end:
            is_cut = self.own_cuts and chunk not in prefix_node.children
            return PrefixReuse("cut" if is_cut else "checkpoint", prefix_node.length, position, known, instead)
        if key_of(prefix_node.key, chunk) in self._evicted_keys:
            return PrefixReuse("evicted", prefix_node.length)
        return PrefixReuse("differs", prefix_node.length, position, known, instead)

    def _longest_known(self, root: Node, prompt: Sequence[int]) -> tuple[int, int | None]:
        """Return the most leading tokens a prompt shares with any cached one, and that cached prompt's next token or None."""
        found: list[tuple[int, int | None]] = [(0, None)]
        waiting = [root]
        while waiting:
            node = waiting.pop()
            for child in _recent(node):
                same = _num_same(child.tokens, prompt, node.length)
                if same == len(child.tokens):
                    waiting.append(child)
                instead = child.tokens[same] if same < len(child.tokens) else None
                found.append((node.length + same, instead))
        return max(found, key=lambda one: (one[0], one[1] is not None))

    def hit(self, node: Node) -> None:
        """Count a cache hit on a node and its ancestors, which become protected and most recently used."""
        for one in node.path():
            one.hits += 1
        self._touch(node, is_protected=True)

    def enter(self, parent: Node, tokens: Tokens, block: Stored, checkpoint: Stored | None, *, is_retained: bool = False) -> Node:
        """Add a computed chunk after `parent` and return its node; an existing node only gets a checkpoint it lacks."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(next(self._numbers), parent, tokens, key_of(parent.key, tokens), block)
            parent.sizes[len(tokens)] += 1
            self.num_entered += 1
            if not node.is_detached:
                self._new[node] = None
                self._resize(node, block.nbytes)
        if node.checkpoint is None and checkpoint is not None:
            node.checkpoint = checkpoint
            self.num_entered += 1
            self._resize(node, checkpoint.nbytes)
        self.on_change(node, node.key)
        self._touch(node, is_protected=is_retained)
        return node

    def pin(self, node: Node) -> None:
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """Release one pin; at zero pins drop a checkpoint not worth its bytes. Then evict down to the budget."""
        node.pins -= 1
        self._drop_checkpoint(node)
        self.shrink()
        self._forget_empty_root(node)

    def forget_tails(self, nodes: Iterable[Node]) -> None:
        """Drop the checkpoints that nodes have only because a prompt ended soon behind them."""
        for node in nodes:
            if node.is_tail:
                node.is_tail = False
                self._drop_checkpoint(node)

    def _drop_checkpoint(self, node: Node) -> None:
        """Drop the checkpoint of a node that no sequence uses, unless it is worth its bytes."""
        if node.parent is not None and not node.pins and not node.is_worth_a_checkpoint and node.checkpoint is not None:
            self._resize(node, -node.checkpoint.nbytes)
            node.checkpoint = None
            self.on_change(node, node.key)

    def shrink(self, budget_bytes: int | None = None) -> None:
        """Evict unpinned leaves until the budget holds: new nodes before protected ones, each in LRU order."""
        budget = self.budget_bytes if budget_bytes is None else budget_bytes
        while self._protected_bytes > PROTECTED_SHARE * budget and self._protected:
            self._move(next(iter(self._protected)), is_protected=False)
        while self.held_bytes > budget:
            nodes = itertools.chain(self._new, self._protected)
            if (victim := next((node for node in nodes if not node.children and not node.pins), None)) is None:
                return
            self._evict(victim)

    def has_room(self, num_bytes: int) -> bool:
        """Evict unpinned leaves until `num_bytes` more fit the budget, as far as possible; returns whether they fit."""
        self.shrink(self.budget_bytes - num_bytes)
        return self.held_bytes + num_bytes <= self.budget_bytes

    def limit(self, budget_bytes: int) -> None:
        if budget_bytes != self.budget_bytes:
            self.budget_bytes = budget_bytes
            self.shrink()

    def clear(self) -> int:
        """Evict every node that no sequence uses; returns the number of evicted nodes."""
        before = len(self)
        self.shrink(0)
        self._evicted_keys.clear()
        return before - len(self)

    def invalidate(self, node: Node) -> int:
        """Remove a node, its chunk's first part and all descendants, even pinned ones; returns their number, 0 for a root."""
        while node.is_rest and node.parent is not None and not node.is_detached:
            node = node.parent
        if node.parent is None or node.is_detached:
            return 0
        self._remove_child(node.parent, node)
        nodes = list(node.subtree())
        for one in nodes:
            del self._row(one)[one]
            self._resize(one, -one.nbytes)
            one.is_detached = True
            self.on_change(one, one.key)
        return len(nodes)

    def _split(self, node: Node, count: int) -> Node:
        """Split a node's chunk after `count` tokens into two nodes; returns the first, a new one that has the other as child."""
        parent, block = node.parent, node.block
        assert parent is not None
        assert block is not None
        if count == len(node.tokens):
            return node
        tokens, rest = node.tokens[:count], node.tokens[count:]
        first_block, rest_block = block.split(count)
        self._remove_child(parent, node)
        first = self.enter(parent, tokens, first_block, node.checkpoint)
        first.hits, first.is_rest = node.hits, node.is_rest
        self._move(first, is_protected=node.is_protected)
        self._resize(node, rest_block.nbytes - block.nbytes)
        node.parent, node.tokens, node.block, node.is_rest = first, rest, rest_block, True
        first.children[rest] = node
        first.sizes[len(rest)] += 1
        for one in node.subtree():
            assert one.parent is not None
            one.former_keys.append(one.key)
            one.key, one.depth = key_of(one.parent.key, one.tokens), one.parent.depth + 1
            self.on_change(one, one.former_keys[-1])
            self.on_change(one, one.key)
        return first

    @staticmethod
    def _remove_child(parent: Node, node: Node) -> None:
        del parent.children[node.tokens]
        parent.sizes -= Counter((len(node.tokens),))  # drops sizes that nobody has

    def _touch(self, node: Node, *, is_protected: bool) -> None:
        """Mark a node and its ancestors as most recently used, the topmost most recent of all; optionally protect them."""
        now = self.clock()
        for one in reversed(node.path()):
            if not one.is_detached:
                one.used_at = now
                self._move(one, is_protected=is_protected or one.is_protected)

    def _row(self, node: Node) -> OrderedDict[Node, None]:
        return self._protected if node.is_protected else self._new

    def _resize(self, node: Node, num_bytes: int) -> None:
        if not node.is_detached:
            self.held_bytes += num_bytes
            self._protected_bytes += num_bytes * node.is_protected

    def _move(self, node: Node, *, is_protected: bool) -> None:
        del self._row(node)[node]
        if is_protected != node.is_protected:
            self._protected_bytes += node.nbytes if is_protected else -node.nbytes
        node.is_protected = is_protected
        self._row(node)[node] = None

    def _evict(self, node: Node) -> None:
        """Evict a leaf, and its ancestors as long as they are left as unpinned leaves without a checkpoint."""
        parent = node.parent
        assert parent is not None
        self.invalidate(node)
        self.num_evicted += 1
        self._evicted_keys[node.key] = None
        if len(self._evicted_keys) > MAX_EVICTED_KEYS:
            self._evicted_keys.popitem(last=False)
        if parent.parent is not None and parent.checkpoint is None and not parent.children and not parent.pins:
            self._evict(parent)
        self._forget_empty_root(parent)

    def _forget_empty_root(self, node: Node) -> None:
        """Drop `node` if it is a root without children and pins, because clients may use any number of salts."""
        if node.parent is None and not node.pins and not node.children:
            self.roots = {key: root for key, root in self.roots.items() if root is not node}


def root_key(salt: str, scope: str = "") -> bytes:
    """Return the key of the empty prefix under a salt and in a scope."""
    return hashlib.blake2b(salt.encode(), digest_size=16, person=scope.encode()).digest()


def key_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash that identifies a path: the path with the key `parent`, extended by a chunk of these tokens."""
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), digest_size=16).digest()


def _recency(node: Node) -> tuple[float, int]:
    return -node.used_at, node.length


def _recent(node: Node) -> Iterable[Node]:
    """Iterate over a node's newest children, as many as are compared with a prompt."""
    return itertools.islice(reversed(node.children.values()), MAX_LOOKED_AT)


def _num_same(tokens: Tokens, prompt: Sequence[int], start: int) -> int:
    there = tuple(prompt[start : start + len(tokens)])
    if tokens == there:
        return len(tokens)
    return next((index for index, (one, other) in enumerate(zip(tokens, there, strict=False)) if one != other), len(there))
