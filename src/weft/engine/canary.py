"""Verifies cached prefixes while the engine is idle: a cached prompt is computed again and compared, chunk by chunk.

What differs is invalidated with all that stands on it, counted and logged. One chunk at a time, so that a request which
comes meanwhile waits for no more than that.
"""

from __future__ import annotations

import logging
import math
import random

import mlx.core as mx

from weft.engine.prefix import PrefixSharing
from weft.memory.prefix_tree import Node, PrefixTree
from weft.model.saved_state import LayerCaches, SavedState

log = logging.getLogger("weft.engine")

TOLERANCE = 1e-3  # of a state's largest value; on CPU computing again gives the same bits, elsewhere nearly


class Canary:
    """Checks one path of the prefix tree at a time."""

    def __init__(self, prefix: PrefixSharing, tree: PrefixTree, chance: random.Random | None = None) -> None:
        self.prefix = prefix
        self.tree = tree
        self.chance = chance or random.Random()
        self.num_checked = 0  # chunks
        self.num_wrong = 0
        self._path: list[Node] = []  # nodes of the path that are still to be checked
        self._caches: LayerCaches = []
        self._checked: set[int] = set()  # numbers of the nodes that were right: they do not change

    def check(self) -> bool:
        """Compute one chunk again and compare; False when there is nothing left to check."""
        if not self._path and not self._choose_path():
            return False
        node, self._path = self._path[0], self._path[1:]
        if node.is_detached or node.parent is None or node.parent.children.get(node.tokens) is not node:
            self._path = []  # it was evicted meanwhile
            return True
        block, checkpoint = self.prefix.runner.compute_again(self._caches, node.tokens, node.parent.length)
        self.num_checked += 1
        worst = max(_worst_difference(node.block, block), _worst_difference(node.checkpoint, checkpoint))
        if worst > TOLERANCE:
            self._invalidate(node, worst)
        else:
            self._checked.add(node.number)
        return True

    def _choose_path(self) -> bool:
        """Choose a path with an unchecked node in it."""
        nodes = [node for node in self.tree.nodes() if node.checkpoint is not None and node.number not in self._checked]
        if not nodes:
            return False
        self._path = self.chance.choice(nodes).path()
        self._caches = self.prefix.runner.adapter.new_caches(self._path[-1].length + 1)
        self._checked &= {node.number for node in self.tree.nodes()}
        return True

    def _invalidate(self, node: Node, worst: float) -> None:
        self._path = []
        self.num_wrong += 1
        count = self.prefix.invalidate_subtree(node)
        log.error(
            "a cached prefix differs when it is computed again: tokens %d to %d by %.3g of their size; "
            "it and what stands on it (%d chunks) are invalidated",
            node.length - len(node.tokens), node.length, worst, count,
        )  # fmt: skip


def _worst_difference(cached: object, again: SavedState) -> float:
    """The largest difference between two states as a share of the largest value; infinite when their geometry differs."""
    if not isinstance(cached, SavedState):
        return 0.0  # it was dropped
    mine, right = cached.arrays, again.arrays
    if [(one.shape, one.dtype) for one in mine] != [(one.shape, one.dtype) for one in right]:
        return math.inf
    return max((_difference(one, other) for one, other in zip(mine, right, strict=True)), default=0.0)


def _difference(mine: mx.array, right: mx.array) -> float:
    if not mine.size or mx.array_equal(mine, right):  # sync: nobody waits for this
        return 0.0
    largest = mx.maximum(mx.abs(right).max().astype(mx.float32), 1e-9)
    found = float(mx.abs(mine.astype(mx.float32) - right.astype(mx.float32)).max() / largest)
    return math.inf if math.isnan(found) else found
