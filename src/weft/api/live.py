"""GET /v1/events: a server-sent event stream of changes in models and requests, for dashboards. Has counts, never text."""

import asyncio
import time
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from weft.api.admin import count_rows, show_replicas, visible_condition
from weft.api.dialect import EVENTS
from weft.api.http import STREAM_HEADERS, until_gone
from weft.api.problems import status_of
from weft.serving.active_request import ActiveRequest
from weft.serving.lifeline import DraftTotals
from weft.serving.model import ServedModel
from weft.serving.service import Service
from weft.serving.tenants import Tenant

TICK_SECONDS = 0.25
MAX_ENDED = 256  # requests that ended since the last tick; of a watcher who does not read the latest are kept
QUIET_TICKS = 4  # if nothing changes, only every fourth tick is sent
CANCELLED = 499

EventRow = dict[str, Any]
GapCounts = list[tuple[float, float]]  # seconds, and how many token gaps were no longer


@dataclass(frozen=True)
class LiveEvents:
    """ASGI endpoint of GET /v1/events: sends changes to the client until it disconnects or the server stops."""

    service: Service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        view, left = LiveView(self.service, scope["state"]["tenant"]), asyncio.create_task(until_gone(receive))
        self.service.watchers.append(view.end_request)
        try:
            headers = [*STREAM_HEADERS, (b"content-type", EVENTS.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not left.done() and not self.service.is_stopping:
                if (news := view.tick(time.monotonic())) is not None:
                    body = b"data: " + msgspec.json.encode(news) + b"\n\n"
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.wait([left], timeout=TICK_SECONDS)
            await send({"type": "http.response.body", "body": b""})
        finally:
            left.cancel()
            self.service.watchers.remove(view.end_request)


class LiveView:
    """The state last sent to one client of GET /v1/events; `tick` computes what has changed since.

    A tenant who is no admin is sent its own requests, and of models nothing that depends on others.
    """

    def __init__(self, service: Service, tenant: Tenant) -> None:
        self.service = service
        self.tenant = tenant
        self._rows: dict[ActiveRequest, EventRow] = {}  # as last sent
        self._num_own: Counter[ActiveRequest] = Counter()  # prompt tokens computed (not cached) so far
        self._ended: deque[ActiveRequest] = deque()
        self._num_missed = 0  # requests that ended and are not told
        self._gaps = {model.name: service.metrics.gaps(model.name) for model in service.models}
        self._num_tokens: Counter[str] = Counter()  # by model, since the last tick
        self._num_prefilled: Counter[str] = Counter()
        self._last: float | None = None
        self._num_quiet = 0

    def end_request(self, request: ActiveRequest) -> None:
        if not self._is_visible(request):
            return
        self._ended.append(request)
        if len(self._ended) > MAX_ENDED:
            self._forget(self._ended.popleft())
            self._num_missed += 1

    def _forget(self, request: ActiveRequest) -> None:
        self._rows.pop(request, None)
        del self._num_own[request]

    def tick(self, now: float) -> EventRow | None:
        """Return an event with changed and queued requests and all models; None on three of four ticks without a change."""
        self._num_tokens.clear()
        self._num_prefilled.clear()
        ended, self._ended = self._ended, deque()
        requests = (*ended, *filter(self._is_visible, self.service.submitted()))
        rows = [row for request in requests if (row := self._news(request, request in ended)) is not None]
        for request in ended:
            self._forget(request)
        rows += [{"id": request.id, "state": "queued"} for request in filter(self._is_visible, self.service.waiting)]
        seconds, self._num_quiet = now - (self._last or now), 0 if rows else self._num_quiet + 1
        if self._num_quiet % QUIET_TICKS and self._last is not None:
            return None
        self._last = now
        models = [self._model(model, seconds) for model in self.service.models]
        missed, self._num_missed = self._num_missed, 0
        event = {"time": round(time.time(), 3), "seconds": round(seconds, 3), "models": models, "requests": rows}
        return event | ({"missed": missed} if missed else {})

    def _is_visible(self, request: ActiveRequest) -> bool:
        return self.tenant.may_see(request.generation.tenant)

    def _news(self, request: ActiveRequest, is_over: bool) -> EventRow | None:
        """Add a request's new tokens to its model's counts for this tick; return the request's row if it changed, else None."""
        row, last = self._row(request, is_over), self._rows.get(request, {})
        # The first `computed` value includes cached tokens, so it does not count as prefilled.
        fresh = row["computed"] - last["computed"] if row["computed"] and last.get("computed") else 0
        if request.choices[0].timings is not None:
            fresh = row["prompt_tokens"] - row["cached_tokens"] - self._num_own[request]
        self._num_tokens[request.model] += row["tokens"] - last.get("tokens", 0)
        self._num_prefilled[request.model] += max(0, fresh)
        self._num_own[request] += max(0, fresh)
        self._rows[request] = row
        return row if row != last else None

    def _row(self, request: ActiveRequest, is_over: bool) -> EventRow:
        usage, generation = request.usage, request.generation
        arrived = round(time.time() - time.monotonic() + request.arrived, 3)
        row = {
            "id": request.id,
            "model": request.model,
            "wire": generation.dialect,
            "arrived": self._rows.get(request, {}).get("arrived", arrived),
            "state": "finished" if is_over else self._state(request),
            "choices": len(request.choices),
            "prompt_tokens": usage.prompt_tokens,
            "computed": request.num_computed,
            "cached_tokens": usage.cached_tokens,
            "tokens": usage.completion_tokens,
            "constrained": generation.grammar is not None,
            "resumed": request.subscription.num_resumed if request.subscription else 0,
            "cause": None if usage.reuse is None else usage.reuse.cause,
            **({} if (replica := self._replica(request)) is None else {"replica": replica}),
        }
        if request.choices[0].timings is not None:
            row |= {"queue_seconds": round(usage.queue_seconds, 4), "prefill_seconds": round(usage.prefill_seconds, 4)}
        if is_over:
            ending = request.finish if request.is_done else "cancelled"
            if request.error is not None:
                ending = "cancelled" if status_of(request.error) == CANCELLED else "error"
            row |= {"decode_seconds": round(usage.decode_seconds, 4), "finish": ending}
        return row

    def _replica(self, request: ActiveRequest) -> str | None:
        """Return the name of the replica that has a request now; None if its model has one replica, or none has it."""
        pool = next((model.pool for model in self.service.models if model.name == request.model), None)
        if pool is None or pool.dispatcher.is_lone or request.subscription is None:
            return None
        open_numbers = request.subscription.open
        return next((one.name for one in pool.replicas if any(n in one.client.live.inside for n in open_numbers)), None)

    def _state(self, request: ActiveRequest) -> str:
        engine = next((model.pool for model in self.service.models if model.name == request.model), None)
        if engine is None or engine.condition.ready is None:
            return "queued"
        if any(choice.num_tokens for choice in request.choices):
            return "decode"
        open_numbers = request.subscription.open if request.subscription is not None else ()
        if any(number in engine.status.following for number in open_numbers):
            return "following"
        is_prefilling = request.num_computed or any(number in engine.status.prefilling for number in open_numbers)
        return "prefill" if is_prefilling else "queued"

    def _model(self, model: ServedModel, seconds: float) -> EventRow:
        status, tokens, prefilled = model.pool.status, self._num_tokens[model.name], self._num_prefilled[model.name]
        is_admin, images = self.tenant.is_admin, status.images if any(status.images.values()) else None
        before, gaps = self._gaps.get(model.name, []), self.service.metrics.gaps(model.name)
        self._gaps[model.name] = gaps
        return {
            "name": model.name,
            **visible_condition(model, self.tenant),
            **count_rows(self.service, model, self.tenant),
            "max_rows": model.pool.max_rows,
            "restarts": model.pool.restarts if is_admin else 0,
            "memory": model.memory if is_admin else {},
            "tokens_per_second": round(tokens / seconds, 1) if seconds else 0,
            "prompt_tokens_per_second": round(prefilled / seconds, 1) if seconds else 0,
            "gaps": percentiles(before, gaps) if is_admin else None,
            "drafts": _show_drafts(model.pool.drafts) if is_admin else None,
            "images": images if is_admin else None,
            **(show_replicas(model) if is_admin else {}),
        }


def _show_drafts(drafts: DraftTotals) -> dict[str, int] | None:
    """Return how many drafts and draft tokens were verified so far, and how many tokens accepted; None before the first."""
    counts = drafts.counts
    numbers = {"verified": drafts.num_drafts, "tokens": counts.num_drafted, "accepted": counts.num_accepted}
    return numbers if drafts.num_drafts else None


def percentiles(before: GapCounts, after: GapCounts) -> dict[str, float] | None:
    """Return p50, p95 and p99 (seconds) of the token gaps between two histogram readings; None if there were none."""
    known = dict(before)
    counts = [(bound, count - known.get(bound, 0)) for bound, count in after]
    if not counts or not counts[-1][1]:
        return None
    return {f"p{percent}": round(_quantile(counts, counts[-1][1] * percent / 100), 5) for percent in (50, 95, 99)}


def _quantile(counts: GapCounts, wanted: float) -> float:
    """Return the seconds below which `wanted` token gaps lie, interpolated linearly between the histogram's bounds."""
    low = below = 0.0
    for bound, count in counts:
        if bound == float("inf"):
            continue
        if count >= wanted:
            return low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return low
