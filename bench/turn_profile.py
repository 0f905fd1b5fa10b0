"""Where the time of an engine's turns goes: the seconds of each part of a turn, those of the parts inside it taken off."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from weft.engine.engine import Engine

PARTS = {  # methods of the engine, or of one of its parts, by what a reader of the profile should call them
    "turn": "the rest of the turn",
    "_make_room": "admitting",
    "scheduler.plan": "planning",
    "speculation.may_draft": "whether to draft",
    "speculation.drafts": "drafting",
    "runner.guesses.guess": "the MTP head",
    "runner.allocate": "allocating",
    "runner.forward": "building the forward",
    "runner.start": "starting it",
    "sample": "demands of constraints",
    "masks.fill": "masks",
    "runner.sample": "sampling",
    "settle": "waiting and settling",
    "runner.keep": "keeping states",
    "speculation.note": "learning",
    "speculation.measure": "learning",
    "prefill": "prefill",
}


class TurnProfile:
    """Seconds spent in each part of an engine's turns while `watching`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seconds: Counter[str] = Counter()
        self.num_turns = 0
        self._inner = [0.0]  # seconds of the parts inside each part under way

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager: time the parts of the engine's turns."""
        watched = []
        for path, name in PARTS.items():
            *owners, method = path.split(".")
            owner: Any = functools.reduce(getattr, owners, self.engine)
            setattr(owner, method, self._timed(getattr(owner, method), name))
            watched.append((owner, method))
        try:
            yield
        finally:
            for owner, method in watched:
                delattr(owner, method)  # the class's own is there again

    def _timed(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                took = time.perf_counter() - started
                self.seconds[name] += took - self._inner.pop()
                self._inner[-1] += took
                self.num_turns += name == PARTS["turn"]

        return call

    def __str__(self) -> str:
        turns = max(1, self.num_turns)
        parts = ", ".join(f"{name} {1e3 * took / turns:.2f}" for name, took in self.seconds.most_common() if took * 1e5 >= turns)
        return f"{1e3 * self.seconds.total() / turns:.2f} ms a turn of {self.num_turns}: {parts}"
