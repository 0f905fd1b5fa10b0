"""What happens here, as it happens: one stream of events for the page, and for whoever else likes to watch.

A watcher looks a few times a second at the answers that are there. Nothing is counted, kept or sent while nobody watches,
and nothing is done for a single token. Tells numbers and causes, never text. `app` serves it at /v1/events.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from weft.api.admin import condition_of
from weft.api.problems import status_of
from weft.api.sse import STREAM_HEADERS, gone
from weft.serving.active_request import ActiveRequest
from weft.serving.model import ServedModel
from weft.serving.service import Service

TICK_SECONDS = 0.25
QUIET_TICKS = 4  # without news a watcher hears so seldom that all is as it was
CANCELLED = 499

Row = dict[str, Any]
Counts = list[tuple[float, float]]  # seconds, and how many gaps were no longer


class LiveEvents:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def stream(self, request: Request) -> LiveResponse:  # noqa: ARG002 - the endpoints' signature
        """Everything that changes, from now on."""
        return LiveResponse(self.service)


class LiveResponse:
    """The response to one watcher, until he goes away or the server is stopped."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the ASGI protocol
        """Send what is new, tick by tick."""
        watch, left = LiveView(self.service), asyncio.create_task(gone(receive))
        self.service.watchers.append(watch.over)
        try:
            headers = [*STREAM_HEADERS, (b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not left.done() and not self.service.is_stopping:
                if (news := watch.tick(time.monotonic())) is not None:
                    body = b"data: " + msgspec.json.encode(news) + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait([left], timeout=TICK_SECONDS)
            await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            self.service.watchers.remove(watch.over)


@dataclass
class Seen:
    """What was told of an answer."""

    arrived: float  # seconds since 1970
    row: Row = field(default_factory=dict)
    tokens: int = 0  # of the answer, counted so far
    computed: int | None = None  # of the prompt, when last looked; None: nothing yet
    read: int = 0  # tokens of the prompt that were computed for it, counted so far


@dataclass
class Work:
    """What a model did since the last tick."""

    tokens: int = 0
    read: int = 0


class LiveView:
    """One watcher's eyes: knows what he was told, and says what is new."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._seen: dict[ActiveRequest, Seen] = {}
        self._ended: list[ActiveRequest] = []
        self._gaps = {served.name: service.metrics.gaps(served.name) for served in service.models}
        self._work: dict[str, Work] = {}
        self._last: float | None = None
        self._quiet = 0

    def over(self, answer: ActiveRequest) -> None:
        """An answer has its end: the next tick tells it."""
        self._ended.append(answer)

    def tick(self, now: float) -> Row | None:
        """What changed since the last time; None if there is nothing to say. The first one tells of all that run."""
        self._work = {served.name: Work() for served in self.service.models}
        ended, self._ended = self._ended, []
        living = self.service.submitted()
        rows = [row for answer in (*ended, *living) if (row := self._news(answer, answer in ended)) is not None]
        for answer in ended:
            self._seen.pop(answer, None)
        rows += [{"id": one.id, "state": "queued"} for one in self.service.waiting]
        seconds, self._quiet = now - (self._last or now), 0 if rows else self._quiet + 1
        if self._quiet % QUIET_TICKS and self._last is not None:
            return None
        self._last = now
        models = [self._model(served, seconds) for served in self.service.models]
        return {"time": round(time.time(), 3), "seconds": round(seconds, 3), "models": models, "requests": rows}

    def _news(self, answer: ActiveRequest, is_over: bool) -> Row | None:
        """The row of an answer if it is another one than before."""
        if (seen := self._seen.get(answer)) is None:
            seen = self._seen[answer] = Seen(time.time() - time.monotonic() + answer.arrived)
        row = self._row(answer, seen, is_over)
        self._count(answer, seen, row)
        if row == seen.row:
            return None
        seen.row = row
        return row

    def _count(self, answer: ActiveRequest, seen: Seen, row: Row) -> None:
        """Add what was done for an answer to its model's work. What was before the first tick is a rate over no time: none."""
        work = self._work.setdefault(answer.model, Work())
        computed = row["computed"] or None
        fresh = 0 if seen.computed is None or computed is None else computed - seen.computed  # the first has what was cached
        if answer.choices[0].timings is not None:
            fresh = row["prompt_tokens"] - row["cached_tokens"] - seen.read
        work.tokens += row["tokens"] - seen.tokens
        work.read += max(0, fresh)
        seen.tokens, seen.computed, seen.read = row["tokens"], computed, seen.read + max(0, fresh)

    def _row(self, answer: ActiveRequest, seen: Seen, is_over: bool) -> Row:
        usage, generation = answer.usage, answer.generation
        row = {
            "id": answer.id,
            "model": answer.model,
            "wire": generation.dialect,
            "arrived": round(seen.arrived, 3),
            "state": "finished" if is_over else self._state(answer),
            "choices": len(answer.choices),
            "prompt_tokens": usage.prompt_tokens,
            "computed": answer.num_computed,
            "cached_tokens": usage.cached_tokens,
            "tokens": usage.completion_tokens,
            "constrained": generation.grammar is not None,
            "resumed": answer.subscription.num_resumed if answer.subscription else 0,
            "cause": None if usage.reuse is None else usage.reuse.cause,
        }
        if answer.choices[0].timings is not None:
            row |= {"queue_seconds": round(usage.queue_seconds, 4), "prefill_seconds": round(usage.prefill_seconds, 4)}
        if is_over:
            row |= {"decode_seconds": round(usage.decode_seconds, 4), "finish": _finish(answer)}
        return row

    def _state(self, answer: ActiveRequest) -> str:
        engine = next((served.supervisor for served in self.service.models if served.name == answer.model), None)
        if engine is None or engine.condition.ready is None:
            return "queued"
        if any(choice.num_tokens for choice in answer.choices):
            return "decode"
        open_numbers = answer.subscription.open if answer.subscription is not None else ()
        if any(number in engine.status.following for number in open_numbers):
            return "following"
        is_prefilled = answer.num_computed or any(number in engine.status.prefilling for number in open_numbers)
        return "prefill" if is_prefilled else "queued"

    def _model(self, served: ServedModel, seconds: float) -> Row:
        status, ready = served.supervisor.status, served.supervisor.condition.ready
        work = self._work.get(served.name, Work())
        before, gaps = self._gaps.get(served.name, []), self.service.metrics.gaps(served.name)
        self._gaps[served.name] = gaps
        return {
            "name": served.name,
            **condition_of(served),
            "rows_running": status.running,
            "rows_waiting": status.waiting,
            "max_rows": ready.max_rows if ready is not None else 0,
            "restarts": served.supervisor.restarts,
            "memory": served.memory,
            "tokens_per_second": round(work.tokens / seconds, 1) if seconds else 0,
            "prompt_tokens_per_second": round(work.read / seconds, 1) if seconds else 0,
            "gaps": percentiles(before, gaps),
        }


def percentiles(before: Counts, after: Counts) -> dict[str, float] | None:
    """Seconds under which half, 95 and 99 of a hundred gaps between tokens were; None where there were no gaps."""
    known = dict(before)
    counts = [(bound, count - known.get(bound, 0)) for bound, count in after]
    if not counts or not counts[-1][1]:
        return None
    return {f"p{percent}": round(_under(counts, counts[-1][1] * percent / 100), 5) for percent in (50, 95, 99)}


def _under(counts: Counts, wanted: float) -> float:
    """The seconds below which so many gaps are, taking those between two bounds as evenly spread."""
    low = below = 0.0
    for bound, count in counts:
        if count >= wanted and bound != float("inf"):
            return low + (bound - low) * (wanted - below) / (count - below)
        if bound != float("inf"):
            low, below = bound, count
    return low


def _finish(answer: ActiveRequest) -> str:
    if answer.error is None:
        return answer.finish if all(choice.finish is not None for choice in answer.choices) else "cancelled"
    return "cancelled" if status_of(answer.error) == CANCELLED else "error"
