"""Caches that rows need no more, kept for the next turn of their conversation: it goes on from them and nothing is copied.

A spare belongs to the node on which its prompt ended, and is used once. Bounded in bytes, which the tree has less. Knows
nothing of what is in them; used by sharing alone.
"""

from __future__ import annotations

from collections import OrderedDict

from weft.memory.prefix_tree import Node
from weft.model.adapter import LayerCaches

SHARE = 8  # of the bytes for kept prompts spares may have one in so many


class RetainedCaches:
    """Owns them; the one that was kept last goes last."""

    def __init__(self) -> None:
        self.share = SHARE
        self.most_bytes = 0
        self.held_bytes = 0
        self._kept: OrderedDict[Node, tuple[LayerCaches, int]] = OrderedDict()

    def keep(self, node: Node, caches: LayerCaches, num_bytes: int) -> None:
        """Keep the caches of a row whose prompt ended on this node."""
        self.take(node)
        self._kept[node] = caches, num_bytes
        self.held_bytes += num_bytes
        self._shrink()

    def take(self, node: Node) -> LayerCaches | None:
        """What was kept for this node, if anything; it is not here any more."""
        caches, num_bytes = self._kept.pop(node, (None, 0))
        self.held_bytes -= num_bytes
        return caches

    def limit(self, budget_bytes: int) -> None:
        """Have no more than a share of this."""
        self.most_bytes = budget_bytes // self.share
        self._shrink()

    def _shrink(self) -> None:
        for node in [node for node in self._kept if node.is_detached]:
            self.take(node)
        while self.held_bytes > self.most_bytes:
            self.take(next(iter(self._kept)))
