"""The route table, and the one handler behind every generating endpoint: read this first.

A dialect brings `translate`, from JSON to a `ParsedRequest`; all between that and the bytes on the socket is done here for all.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import ollama, openapi, problems
from weft.api.admin import Admin
from weft.api.anthropic import request as anthropic
from weft.api.dialect import ParsedRequest, Reply, ReplyHeader, pick_fields
from weft.api.http import Deadline, Guard, Page, json_response, read_json
from weft.api.live import LiveEvents
from weft.api.openai import chat, completions
from weft.api.openai.responses import request as responses
from weft.api.openai.responses.routes import StoredResponses
from weft.api.sse import EventStream, make_whole_body
from weft.config import ServerConfig
from weft.errors import ContextTooLong
from weft.ipc.limits import Sampling
from weft.log import RequestRecord, log_request
from weft.serving.active_request import ActiveRequest
from weft.serving.registry import ModelRegistry
from weft.serving.service import Service

LARGE_BODY_BYTES = 1 << 16  # larger ones are translated in a thread: a large schema takes its time, and streams must not wait
SILENCE_SECONDS = 60.0  # between two wake-ups of a reply that is not streamed
# Clients that send one of these come again with more of the same conversation.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session_id", "session-id", "x-claude-code-session-id")

Translate = Callable[..., ParsedRequest]  # takes a body, and where there is a Recall the past
Recall = Callable[[dict[str, Any], bytes], Awaitable[responses.Past]]  # takes a body, and the key it was sent with


def make_app(service: Service, config: ServerConfig) -> Starlette:
    """The server as an ASGI application, with the guard around it."""
    registry = ModelRegistry(service, config.memory and config.memory * 2**20, config.drain_seconds)
    admin, models, page = Admin(service, config, registry), ollama.OllamaModels(service, config), Page()
    stored = StoredResponses(service, config)

    async def count_message_tokens(request: Request) -> Response:
        generation = await asyncio.to_thread(anthropic.translate_count, await read_json(request, config))
        return json_response({"input_tokens": await service.count_tokens(generation)})

    def generate(path: str, dialect: str, translate: Translate, recall: Recall | None = None) -> Route:
        return post(path, GeneratingEndpoint(service, config, dialect, translate, recall).handle)

    def post(path: str, endpoint: Callable[[Request], Any]) -> Route:
        return Route(path, endpoint, methods=["POST"])

    routes = [
        *(Route(path, page.serve_file) for path in page.files),  # Claude Code sends HEAD / to see whether a server is there
        generate("/v1/chat/completions", "chat", chat.translate),
        generate("/v1/completions", "completions", completions.translate),
        generate("/v1/responses", "responses", responses.translate, stored.recall),
        post("/v1/responses/input_tokens", stored.count_tokens),
        Route("/v1/responses/{id}", stored.get),
        Route("/v1/responses/{id}", stored.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", stored.list_items),
        post("/v1/responses/{id}/cancel", stored.cancel),
        generate("/v1/messages", "messages", anthropic.translate),
        post("/v1/messages/count_tokens", count_message_tokens),
        generate("/api/chat", "ollama", ollama.translate_chat),
        generate("/api/generate", "ollama", ollama.translate_generate),
        Route("/api/version", models.version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        post("/api/show", models.show),
        post("/api/embed", models.embed),
        post("/api/embeddings", models.embed),
        Route("/v1/models", admin.list_models),
        Route("/v1/models/available", admin.list_available),
        post("/v1/models/load", admin.load),
        post("/v1/models/unload", admin.unload),
        Route("/v1/models/{id:path}", admin.show_model),
        post("/v1/requests/{id}/cancel", admin.cancel),
        Route("/v1/cache", admin.list_cache),
        post("/v1/cache/clear", admin.clear_cache),
        Route("/v1/cache/requests/{id}", admin.report_request),
        Route("/v1/status", admin.status),
        Route("/v1/events", LiveEvents(service), methods=["GET"]),
        Route("/health", admin.health),
        Route("/metrics", admin.metrics),
        Route("/openapi.json", openapi.serve_document),
        post("/tokenize", admin.tokenize),
        post("/detokenize", admin.detokenize),
    ]
    guard = Middleware(Guard, config=config, open_paths=page.files, on_response=service.metrics.http)
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: problems.handle})


@dataclass(frozen=True)
class GeneratingEndpoint:
    """An endpoint that generates: the same steps for all dialects, around the `translate` function of one."""

    service: Service
    config: ServerConfig
    dialect: str
    translate: Translate
    recall: Recall | None

    async def handle(self, request: Request) -> Any:
        """Parse the body, start the request, and reply: streamed, as one body, or with what is wrong."""
        account, request_id = RequestAccount(request, self.dialect, self.service), request.state.request_id
        try:
            deadline = Deadline.of(request.headers, self.config.request_timeout)
            parsed = await self._parse(request)
            model = self.service.find(parsed.generation.model)
            account.model = model.name
            headers = {"x-ignored-params": quote(", ".join(parsed.ignored), safe=", ")[:1000]} if parsed.ignored else {}

            def make_reply(sampling: Sampling | None = None) -> Reply:
                ready = next((one.ready for one in self.service.models), None)
                fingerprint = ready.versions if ready is not None else "weft"
                return parsed.reply(ReplyHeader(request_id, int(time.time()), model.name, fingerprint, sampling))

            if not parsed.generation.prompts:  # the client wants the model loaded and nothing else
                await deadline.hold(model.settled.wait())
                model.require()
                account.close(None)
                return json_response(make_reply().make_body(), headers=headers)
            active = account.active = ActiveRequest(request_id, parsed.generation, may_wait=parsed.stream)
            parts = self.service.generate(active, self.config.heartbeat_seconds if parsed.stream else SILENCE_SECONDS)
            try:
                await deadline.hold(anext(parts))
            except ContextTooLong as error:
                if not (parsed.stream and parsed.streams_overflow):
                    raise
                account.close(error)
                reply = make_reply()
                return Response(reply.frame_opening() + reply.frame_error(error), headers=headers, media_type=parsed.media_type)
            reply = make_reply(active.sampling)
            if parsed.stream:
                return EventStream(reply, active, parts, account.close, deadline, headers | {"content-type": parsed.media_type})
            body = await make_whole_body(reply, active, parts, request.receive, deadline)
            account.close(None)
            return json_response(body, headers=headers)
        except Exception as error:  # the guard replies to it; here it is only counted
            account.close(error)
            raise

    async def _parse(self, request: Request) -> ParsedRequest:
        """The body as its dialect understands it, with the request's dialect, session and client."""
        body = await read_json(request, self.config)
        past = {} if self.recall is None else {"past": await self.recall(body, request.state.api_key)}
        is_large = self.recall is not None or int(request.headers.get("content-length") or 0) > LARGE_BODY_BYTES
        parsed = await asyncio.to_thread(self.translate, body, **past) if is_large else self.translate(body)
        session = parsed.generation.session or next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
        who = request.state.api_key + b"\0" + session.encode()  # clients take turns; they are known by key and session
        client = hashlib.blake2b(who, digest_size=8).hexdigest() if who != b"\0" else ""
        generation = replace(parsed.generation, dialect=self.dialect, session=session, client=client)
        return replace(parsed, generation=generation)


@dataclass
class RequestAccount:
    """One HTTP request from its arrival to the record it leaves in log and metrics."""

    request: Request
    dialect: str
    service: Service
    model: str = "-"
    active: ActiveRequest | None = None
    arrived: float = field(default_factory=time.monotonic)

    def close(self, error: BaseException | None) -> None:
        """Log the request, and count it if the engine had it."""
        path, address = self.request.scope["path"], self.request.client
        status = 200 if error is None else problems.status_of(error, path) if isinstance(error, Exception) else 499
        active = self.active if self.active is not None and self.active.is_submitted else None
        finish = "cancelled" if status == 499 else "error" if error is not None else active.finish if active else None
        record = RequestRecord(
            request_id=self.request.state.request_id,
            client=f"{address.host}:{address.port}" if address else "-",
            dialect=self.dialect,
            model=self.model,
            status=status,
            finish=finish,
            total_seconds=time.monotonic() - self.arrived,
            **({} if active is None else _measurements(active)),
        )
        log_request(record)
        if active is not None and finish is not None:
            self.service.metrics.finished(record)


def _measurements(active: ActiveRequest) -> dict[str, Any]:
    names = ("prompt_tokens", "cached_tokens", "completion_tokens", "queue_seconds", "prefill_seconds", "decode_seconds")
    reuse = active.usage.reuse
    own = {"miss_cause": None if reuse is None else reuse.cause, "first_token_seconds": active.first_token_seconds}
    return pick_fields(active.usage, *names) | own
