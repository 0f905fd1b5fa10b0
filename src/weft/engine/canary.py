"""Looks after what is kept: when nothing else is to do, a kept prompt is computed again and compared, chunk by chunk.

What differs is thrown out with all that stands on it, counted and told. Used by the engine's host; one chunk at a time, so
a request that comes meanwhile waits for no more than that.
"""

from __future__ import annotations

import logging
import math
import random

import mlx.core as mx

from weft.engine.prefix import PrefixSharing
from weft.engine.runner import Runner
from weft.memory.prefix_tree import Node
from weft.model.adapter import LayerCaches, Saved

log = logging.getLogger("weft.engine")

TOLERANCE = 1e-3  # of the largest value in a state; computed again they are bit-equal on CPU, nearly so elsewhere


class Canary:
    """Checks one path at a time."""

    def __init__(self, prefix: PrefixSharing, runner: Runner, chance: random.Random | None = None) -> None:
        self.prefix = prefix
        self.runner = runner
        self.chance = chance or random.Random()
        self.num_checked = 0  # chunks
        self.num_wrong = 0
        self._left: list[Node] = []  # of the path being checked
        self._caches: LayerCaches | None = None
        self._seen: set[int] = set()  # numbers of nodes that were found right: they do not change

    def check(self) -> bool:
        """Compute one chunk again; whether there is more to do."""
        if not self._left and not self._begin():
            return False
        node, self._left = self._left[0], self._left[1:]
        if node.is_detached or node.parent is None or node.parent.children.get(node.tokens) is not node:
            self._left = []  # it went meanwhile
            return True
        assert self._caches is not None
        block, checkpoint = self.runner.compute_again(self._caches, node.tokens, node.parent.length)
        self.num_checked += 1
        worst = max(_worst(node.block, block), _worst(node.checkpoint, checkpoint))
        if worst > TOLERANCE:
            self._quarantine(node, worst)
        else:
            self._seen.add(node.number)
        return True

    def _begin(self) -> bool:
        """Choose a path with something in it that was not checked yet; those behind others first, they check the others too."""
        nodes = [node for node in self.prefix.tree.nodes() if node.checkpoint is not None and node.number not in self._seen]
        if not nodes:
            return False
        self._left = self.chance.choice(nodes).path()
        self._caches = self.runner.adapter.new_caches(self._left[-1].length + 1)
        self._seen &= {node.number for node in self.prefix.tree.nodes()}
        return True

    def _quarantine(self, node: Node, worst: float) -> None:
        self._left = []
        self.num_wrong += 1
        count = self.prefix.invalidate_subtree(node)
        log.error(
            "a kept prompt is not what it was when computed again: tokens %d to %d differ by %.3g of their size; "
            "it and what stands on it (%d chunks) are thrown out",
            node.length - len(node.tokens), node.length, worst, count,
        )  # fmt: skip


def _worst(kept: object, again: Saved) -> float:
    """The largest difference between two states, as a share of the largest value; infinite where they are of two kinds."""
    if not isinstance(kept, Saved):
        return 0.0  # it was dropped
    mine, right = kept.arrays, again.arrays
    if [(one.shape, one.dtype) for one in mine] != [(one.shape, one.dtype) for one in right]:
        return math.inf
    return max((_difference(one, other) for one, other in zip(mine, right, strict=True)), default=0.0)


def _difference(mine: mx.array, right: mx.array) -> float:
    if not mine.size or mx.array_equal(mine, right):  # sync: nobody waits for this
        return 0.0
    largest = mx.maximum(mx.abs(right).max().astype(mx.float32), 1e-9)
    found = float(mx.abs(mine.astype(mx.float32) - right.astype(mx.float32)).max() / largest)
    return math.inf if math.isnan(found) else found
