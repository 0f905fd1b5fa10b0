"""The route table, and the one handler behind every generating endpoint: read this first.

A wire gives `translate` (JSON → Asked); everything between that and the bytes on the socket is the same for all of them.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from weft.api import problems
from weft.api.admin import Status, json_response
from weft.api.anthropic import messages
from weft.api.body import read_json
from weft.api.cache_routes import Cache
from weft.api.deadline import Deadline
from weft.api.dialect import ParsedRequest, ReplyHeader
from weft.api.guards import Guard
from weft.api.live import LiveEvents
from weft.api.ollama import chat as ollama
from weft.api.ollama.models import OllamaEndpoints
from weft.api.openai import chat, completions, responses
from weft.api.openai.response_routes import Responses
from weft.api.openai.responses import Past
from weft.api.page import Page
from weft.api.sse import EventStream, whole
from weft.config import ServerConfig
from weft.errors import ContextTooLong
from weft.log import request_line
from weft.serving.answer import ActiveRequest
from weft.serving.service import Service
from weft.text.types import GenerationRequest

LARGE_BODY = 1 << 16  # bytes
# Their clients come again with more of the same.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session_id", "session-id", "x-claude-code-session-id")

Translate = Callable[..., ParsedRequest]  # takes a body, and where there is a Recall the past
Recall = Callable[[dict[str, Any], bytes], Awaitable[Past]]  # takes a body, and the key that sends it


def make_app(service: Service, config: ServerConfig) -> Starlette:
    """The server as an ASGI application, guards around it."""
    status, cache, models = Status(service, config), Cache(service, config), OllamaEndpoints(service, config)
    kept, page, events = Responses(service, config, status), Page(), LiveEvents(service)
    routes = [
        *(Route(path, page.file) for path in page.files),  # Claude Code asks by HEAD / whether somebody is there
        _generating("/v1/chat/completions", "chat", chat.translate, service, config),
        _generating("/v1/completions", "completions", completions.translate, service, config),
        _generating("/v1/responses", "responses", responses.translate, service, config, kept.recall),
        Route("/v1/responses/input_tokens", kept.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", kept.get),
        Route("/v1/responses/{id}", kept.delete, methods=["DELETE"]),
        Route("/v1/responses/{id}/input_items", kept.items),
        Route("/v1/responses/{id}/cancel", kept.cancel, methods=["POST"]),
        _generating("/v1/messages", "messages", messages.translate, service, config),
        _counting("/v1/messages/count_tokens", messages.translate_count, service, config),
        _generating("/api/chat", "ollama", ollama.translate_chat, service, config),
        _generating("/api/generate", "ollama", ollama.translate_generate, service, config),
        Route("/api/version", models.version),
        Route("/api/tags", models.tags),
        Route("/api/ps", models.ps),
        Route("/api/show", models.show, methods=["POST"]),
        Route("/api/embed", models.embed, methods=["POST"]),
        Route("/api/embeddings", models.embed, methods=["POST"]),
        Route("/v1/models", status.models),
        Route("/v1/models/available", status.available),
        Route("/v1/models/load", status.load, methods=["POST"]),
        Route("/v1/models/unload", status.unload, methods=["POST"]),
        Route("/v1/models/{id:path}", status.model),
        Route("/v1/requests/{id}/cancel", status.cancel, methods=["POST"]),
        Route("/v1/cache", cache.list),
        Route("/v1/cache/clear", cache.clear, methods=["POST"]),
        Route("/v1/cache/requests/{id}", cache.report),
        Route("/v1/status", status.status),
        Route("/v1/events", events.stream),
        Route("/health", status.health),
        Route("/metrics", status.metrics),
        Route("/openapi.json", status.openapi),
        Route("/tokenize", status.tokenize, methods=["POST"]),
        Route("/detokenize", status.detokenize, methods=["POST"]),
    ]
    guard = Middleware(
        Guard,
        api_keys=config.api_keys,
        open_paths=("/health", *page.files),
        allowed_hosts=(*config.allowed_hosts, config.host),
        allowed_origins=config.allowed_origins,
        on_response=service.metrics.http,
    )
    return Starlette(routes=routes, middleware=[guard], exception_handlers={HTTPException: problems.handle})


def _generating(
    path: str, wire: str, translate: Translate, service: Service, config: ServerConfig, recall: Recall | None = None
) -> Route:
    async def endpoint(request: Request) -> Any:
        """Understand the body, ask the service, and reply: streamed, whole, or with what is wrong."""
        visit = RequestAccount(request, wire, service)
        try:
            deadline = Deadline.of(request.headers, config.request_timeout)
            body = await read_json(request, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
            # A large schema takes its time; streams are not to wait for it.
            large = int(request.headers.get("content-length") or 0) > LARGE_BODY or recall is not None
            known = {} if recall is None else {"past": await recall(body, request.state.api_key)}
            asked = await asyncio.to_thread(translate, body, **known) if large else translate(body)
            generation = _from(request, replace(asked.generation, wire=wire))
            served = service.find(generation.model)
            sampling = None if served.codec is None else served.codec.sampling(generation.sampling)
            heading = ReplyHeader(visit.request_id, int(time.time()), served.name, _fingerprint(service), sampling)
            reply = asked.reply(heading)
            visit.model = served.name
            headers = {"x-ignored-params": quote(", ".join(asked.ignored), safe=", ")[:1000]} if asked.ignored else {}
            if not generation.prompts:  # only the model is asked for
                await deadline.hold(served.until_settled())
                served.require()
                visit.ended(None, None)
                return json_response(reply.whole(), headers=headers)
            if asked.stream and served.is_loading:
                waiting = service.open_later(generation, visit.request_id)
                return EventStream(reply, waiting, config.heartbeat_seconds, headers, visit.ended, deadline, asked.media_type)
            try:
                answer = visit.answer = await deadline.hold(service.open(generation, visit.request_id))
            except ContextTooLong as error:
                if not (asked.stream and asked.streams_overflow):
                    raise
                visit.ended(None, error)
                return Response(reply.opening() + reply.failure(error), headers=headers, media_type=asked.media_type)
            if asked.stream:
                return EventStream(reply, answer, config.heartbeat_seconds, headers, visit.ended, deadline, asked.media_type)
            response = json_response(await whole(reply, answer, request.receive, deadline), headers=headers)
            visit.ended(answer, None)
            return response
        except Exception as error:  # told by the guard; here it is only counted
            visit.ended(visit.answer, error)
            raise

    return Route(path, endpoint, methods=["POST"])


def _counting(
    path: str, translate: Callable[[dict[str, Any]], GenerationRequest], service: Service, config: ServerConfig
) -> Route:
    async def endpoint(request: Request) -> Any:
        """How many tokens a request's prompt has."""
        body = await read_json(request, max_bytes=config.max_body_bytes, seconds=config.body_seconds)
        generation = await asyncio.to_thread(translate, body)
        return json_response({"input_tokens": await service.count(generation)})

    return Route(path, endpoint, methods=["POST"])


def _from(request: Request, generation: GenerationRequest) -> GenerationRequest:
    """The same with who asks: a session where the client names one, else a key. Clients take turns; none is known by name."""
    session = generation.session or next(filter(None, map(request.headers.get, SESSION_HEADERS)), "")
    who = request.state.api_key + b"\0" + session.encode()
    client = hashlib.blake2b(who, digest_size=8).hexdigest() if who != b"\0" else ""
    return replace(generation, session=session, client=client)


class RequestAccount:
    """One request at the door: who, by which wire, and the line it leaves in log and metrics."""

    def __init__(self, request: Request, wire: str, service: Service) -> None:
        self.request_id: str = request.state.request_id
        self.client = f"{request.client.host}:{request.client.port}" if request.client else "-"
        self.wire = wire
        self.path = request.scope["path"]
        self.service = service
        self.model = "-"
        self.answer: ActiveRequest | None = None
        self.arrived = time.monotonic()

    def ended(self, answer: ActiveRequest | None, error: BaseException | None) -> None:
        """Count it and say so, once."""
        status = 200 if error is None else problems.status_of(error, self.path) if isinstance(error, Exception) else 499
        usage = answer.usage if answer is not None else None
        finish = "cancelled" if status == 499 else "error" if error is not None else answer.finish if answer else None
        request_line(
            request_id=self.request_id,
            client=self.client,
            wire=self.wire,
            model=self.model,
            status=status,
            finish=finish,
            usage=usage,
        )
        if answer is not None and finish is not None:
            first, total = answer.first_token_seconds, time.monotonic() - self.arrived
            self.service.metrics.finished(self.model, self.wire, finish, usage, first, total)


def _fingerprint(service: Service) -> str:
    ready = next((served.supervisor.condition.ready for served in service.models), None)
    return ready.versions if ready is not None else "weft"
