"""What was computed once: a tree of prompt chunks, each with its keys and values, some with the states of all other layers.

A child is found by its chunk's tokens, so a path is both the tokens and the places where they were cut: the states at its end
are bit for bit what a cold run has there. Knows tokens and bytes; blocks and checkpoints are opaque. Imports no mlx.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Protocol

LATTICE = 4  # every so many chunks a checkpoint is kept, whatever comes


class Stored(Protocol):
    """Something with a size."""

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""


class Node:
    """A chunk that is in memory; `length` tokens lead to its end."""

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], block: Stored | None, checkpoint: Stored | None) -> None:
        self.parent = parent
        self.tokens = tokens
        self.length: int = (parent.length if parent is not None else 0) + len(tokens)
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.block = block
        self.checkpoint = checkpoint  # the states of all layers without keys and values, at its end; None: dropped
        self.children: dict[tuple[int, ...], Node] = {}
        self.pins = 0  # sequences that stand on it
        self.used = 0  # when it was last needed, in the tree's own time
        self.keep = False  # its checkpoint is worth its bytes: a prompt ended here, or two parted

    @property
    def nbytes(self) -> int:
        """Bytes of what it holds."""
        return sum(stored.nbytes for stored in (self.block, self.checkpoint) if stored is not None)

    def path(self) -> list[Node]:
        """From the first chunk to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Owns the nodes and their ages. Bounded in bytes; what a sequence stands on is never taken away."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.root = Node(None, (), None, _Nothing())
        self.held_bytes = 0
        self.num_evicted = 0
        self._clock = itertools.count(1)

    def match(self, chunks: Iterator[tuple[int, ...]], start: Node) -> Node:
        """The deepest node on this way from `start` at which every layer can be restored."""
        node = found = start
        for tokens in chunks:
            child = node.children.get(tokens)
            if child is None:
                break
            node = child
            if node.checkpoint is not None:
                found = node
        self._touch(found)
        return found

    def enter(self, parent: Node, tokens: tuple[int, ...], block: Stored, checkpoint: Stored) -> Node:
        """A chunk has been computed after `parent`. Gives its node; an older one is kept, and gets what it lacks."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, block, None)
            self.held_bytes += block.nbytes
        if node.checkpoint is None:
            node.checkpoint = checkpoint
            self.held_bytes += checkpoint.nbytes
        self._touch(node)
        return node

    def pin(self, node: Node) -> None:
        """A sequence stands here."""
        node.pins += 1

    def unpin(self, node: Node) -> None:
        """It has left. What nobody needs any more goes when there is no room."""
        node.pins -= 1
        self._thin(node)
        self.shrink()

    def shrink(self) -> None:
        """Back to the budget: leaves first, the longest unused of them first."""
        while self.held_bytes > self.budget_bytes:
            victims = [node for node in self.nodes() if not node.children and not node.pins]
            if not victims:
                return
            self._remove(min(victims, key=lambda node: node.used))

    def clear(self) -> None:
        """Forget everything that nobody stands on."""
        budget, self.budget_bytes = self.budget_bytes, 0
        self.shrink()
        self.budget_bytes = budget

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before children."""
        waiting = list(self.root.children.values())
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()

    def _thin(self, node: Node) -> None:
        """Drop a checkpoint that is not worth its bytes."""
        is_worth = node.keep or len(node.children) != 1 or node.depth % LATTICE == 0
        if node.parent is None or node.pins or is_worth or node.checkpoint is None or node.checkpoint.nbytes == 0:
            return
        self.held_bytes -= node.checkpoint.nbytes
        node.checkpoint = None

    def _touch(self, node: Node | None) -> None:
        now = next(self._clock)
        while node is not None:
            node.used = now
            node = node.parent

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.tokens]
        self.held_bytes -= node.nbytes
        self.num_evicted += 1


class _Nothing:
    """The states before the first token: none."""

    nbytes = 0


def chunks_of(prompt: Sequence[int], start: int, ends: Iterator[int]) -> Iterator[tuple[int, ...]]:
    """The chunks of a prompt from `start` on."""
    for end in ends:
        yield tuple(prompt[start:end])
        start = end
