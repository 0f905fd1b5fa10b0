"""Keeps compiled grammars for the next request that asks for the same, apart by owner and bounded in number.

A compiled grammar takes a few megabytes, and clients may send a new one with every request. So one that was asked for once is
kept among a few and for some seconds; one that was asked for again, soon or late, is kept among many. Used by the compiler, from
several threads.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from weft.errors import GrammarRejected
from weft.grammar.constraint import Matcher
from weft.ipc.messages import GrammarSpec

Owner: TypeAlias = tuple[str, str]  # scope and salt, as of cached prefixes: how fast a grammar is there tells others nothing
Key: TypeAlias = tuple[Owner, GrammarSpec]

MAX_GRAMMARS = 64
MAX_ONCE_USED = 8  # of those: asked for once so far
ONCE_USED_SECONDS = 10.0  # after these an idle engine drops them
MAX_REMEMBERED = 1024  # hashes of grammars that were dropped before they were asked for again
MAX_USES = 256  # forks share a lexer whose states only grow; after so many a grammar is compiled anew
NOBODY: Owner = ("", "")


@dataclass
class KeptGrammar:
    """A compiled grammar in the cache."""

    found: Matcher | GrammarRejected  # or why it can not be enforced
    is_wanted_again: bool
    kept_at: float
    num_uses: int = 1


class GrammarCache:
    """Compiled grammars by owner, of which the least recently used of the owner with most of them is dropped first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._entries: OrderedDict[Key, KeptGrammar] = OrderedDict()
        self._dropped: OrderedDict[int, None] = OrderedDict()  # hashes of keys
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def take(self, owner: Owner, spec: GrammarSpec) -> Matcher | GrammarRejected | None:
        """Return what an owner's grammar was compiled to; None if it must be compiled."""
        with self._lock:
            entry = self._entries.get((owner, spec))
            if entry is None or entry.num_uses >= MAX_USES:
                return None
            entry.num_uses += 1
            entry.is_wanted_again = True
            self._entries.move_to_end((owner, spec))
            return entry.found

    def keep(self, owner: Owner, spec: GrammarSpec, found: Matcher | GrammarRejected) -> None:
        """Keep what a grammar was compiled to, in place of what was kept before."""
        key = owner, spec
        with self._lock:
            is_known = self._entries.pop(key, None) is not None or hash(key) in self._dropped
            self._entries[key] = KeptGrammar(found, is_known, self._clock())
            self._shrink()

    def forget(self, owner: Owner, spec: GrammarSpec) -> None:
        with self._lock:
            self._entries.pop((owner, spec), None)

    def drop_stale(self) -> None:
        """Drop grammars that were asked for once, some time ago."""
        with self._lock:
            now = self._clock()
            for key in self._once_used():
                if now > self._entries[key].kept_at + ONCE_USED_SECONDS:
                    self._drop(key)

    def _once_used(self) -> list[Key]:
        return [key for key, entry in self._entries.items() if not entry.is_wanted_again]

    def _drop(self, key: Key) -> None:
        del self._entries[key]
        self._dropped[hash(key)] = None
        if len(self._dropped) > MAX_REMEMBERED:
            self._dropped.popitem(last=False)

    def _shrink(self) -> None:
        once = self._once_used()
        if len(once) > MAX_ONCE_USED:
            self._drop(once[0])
        if len(self._entries) > MAX_GRAMMARS:
            most = Counter(owner for owner, _ in self._entries).most_common(1)[0][0]
            del self._entries[next(key for key in self._entries if key[0] == most)]
