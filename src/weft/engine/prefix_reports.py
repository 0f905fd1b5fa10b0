"""Reports what the prefix cache gets and evicts, for fronts that choose between replicas by what each has cached."""

from weft.ipc.messages import ReportedChunk
from weft.memory.prefix_tree import Node, PrefixTree

MAX_REPORTED = 2000  # chunks in one message; the others follow in the next


class PrefixReports:
    """Collects the changes of a prefix tree until they are sent; of several changes of one key the last counts."""

    def __init__(self, tree: PrefixTree) -> None:
        self._changes: dict[bytes, ReportedChunk | None] = {}  # by key; None: evicted
        tree.on_change = self._note

    def take(self) -> tuple[list[ReportedChunk], list[bytes]]:
        """Return the chunks that came or changed, and the keys of those that went, since the last call; not all of very many."""
        keys = list(self._changes)[:MAX_REPORTED]
        taken = {key: self._changes.pop(key) for key in keys}
        return [chunk for chunk in taken.values() if chunk is not None], [key for key, chunk in taken.items() if chunk is None]

    def _note(self, node: Node, key: bytes) -> None:
        self._changes.pop(key, None)  # a parent is reported before what stands on it
        if node.is_detached or node.parent is None or node.key != key:
            self._changes[key] = None
        else:
            self._changes[key] = ReportedChunk(key, node.parent.key, len(node.tokens), node.checkpoint is not None)
